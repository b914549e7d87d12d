"""Decode, prefill and whole texts of one shape, by the runner that serves GPUs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import DrawTensors
from bakehouse_replica.core.executor import Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import Capacity, Chunk, Request, Sample, SchedulingPolicy, StepPlan
from bakehouse_replica.model.batch import flatten, index_arrays
from bakehouse_replica.model.buckets import Buckets
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.device_runner import DeviceRunner, StepLimits
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.source import ModelFiles
from gpu_limits import Limits, seconds
from gpu_shapes import Costs

BLOCK_SIZE = 16
N_WARM, N_STEPS = 4, 32
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Steps of `batch` sequences at `context` tokens; seconds a step, `device_s` with nobody in between."""

    batch: int
    context: int
    step_s: float
    begin_s: float
    device_s: float
    floor_s: float

    @property
    def ratio(self) -> float:
        """Of the floor to what a step takes: 1 is as fast as can be."""
        return self.floor_s / self.step_s

    @property
    def idle_share(self) -> float:
        """How much of a step the device waits."""
        return max(0.0, 1 - self.device_s / self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A step of so many prompts of so many tokens; `ratio` is of the products' ceiling."""

    n_prompts: int
    n_tokens: int
    step_s: float
    ratio: float


@dataclass(slots=True)
class Served:
    """Whole texts through scheduler and runner; seconds of each part of the steps in which all decode."""

    total_s: float = 0.0
    n_output: int = 0
    plan_s: list[float] = field(default_factory=list)
    begin_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


class Bench:
    """One shape on one device with dummy weights, and a cache of `cache_bytes`."""

    def __init__(
        self,
        files: ModelFiles,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batches: Sequence[int],
        max_context: int,
        max_step_tokens: int,
        cache_bytes: int,
    ) -> None:
        self.spec: ModelSpec = read_spec(files)
        self.costs = Costs(self.spec, dtype.itemsize)
        self._ops, self._device = ops, device
        self._max_sequences, self._max_step_tokens = max(batches), max_step_tokens
        self.max_model_len = max_context + 2 * (N_WARM + N_STEPS) + BLOCK_SIZE
        self.n_blocks = cache_bytes // (self.costs.token_bytes * BLOCK_SIZE) - 1
        begun_at = perf_counter()
        self._decoder = Decoder(self.spec, load_weights(files, self.spec, dtype=dtype, device=device), ops)
        cache = ops.new_cache(
            n_layers=self.spec.n_layers,
            n_blocks=self.n_blocks + 1,
            block_size=BLOCK_SIZE,
            n_kv_heads=self.spec.n_kv_heads,
            head_dim=self.spec.head_dim,
        )
        for tensor in (*cache.key, *cache.value):
            tensor.zero_()  # contexts that nobody has written must be finite
        widths = sorted({128, -(-self.max_model_len // BLOCK_SIZE)})
        self.runner = DeviceRunner(
            decoder=self._decoder,
            cache=cache,
            ops=ops,
            device=device,
            limits=StepLimits(max_tokens=max_step_tokens, max_sequences=self._max_sequences),
            buckets=Buckets(tuple(sorted({*batches})), tuple(widths)),
        )
        self.loaded_s = perf_counter() - begun_at
        begun_at = perf_counter()
        self.runner.graphs.record()
        self.recorded_s = perf_counter() - begun_at

    def holds(self, batch: int, context: int) -> bool:
        """Whether the cache does."""
        return batch * -(-(context + N_WARM + N_STEPS + 1) // BLOCK_SIZE) <= self.n_blocks

    def decode(self, batch: int, context: int, limits: Limits) -> Decoded:
        """Steps that overlap: each is begun before the result of the last one is taken."""
        plans = decode_plans(batch, context, N_WARM + N_STEPS)
        flights: deque[Pending] = deque()
        begin_s: list[float] = []
        measured_from = 0.0
        for step, one in enumerate(plans):
            if step == N_WARM:
                self._synchronize()
                measured_from = perf_counter()
            begun_at = perf_counter()
            flights.append(self.runner.begin(one))
            begin_s.append(perf_counter() - begun_at)
            if len(flights) == 2:
                flights.popleft().result()
        while flights:
            flights.popleft().result()
        step_s = (perf_counter() - measured_from) / N_STEPS
        return Decoded(
            batch=batch,
            context=context,
            step_s=step_s,
            begin_s=median(begin_s[N_WARM:]),
            device_s=self.device_seconds(plans[-1]),
            floor_s=self.costs.decode_floor_s(batch, context, limits.bytes_per_s, limits.operations_per_s),
        )

    @torch.inference_mode()
    def device_seconds(self, plan: StepPlan) -> float:
        """Of the recording of this step, played again and again."""
        flat = flatten(plan.chunks)
        bucket = self.runner.graphs.find(len(flat.n_tokens_S), int(flat.n_blocks_S.max()))
        assert bucket is not None, "a step of a bucket that is recorded"
        self.runner.graphs.play(bucket, index_arrays(flat, BLOCK_SIZE))
        return seconds(lambda: self.runner.graphs.replay(bucket), self._device, 10)

    @torch.inference_mode()
    def draw_seconds(self, batch: int) -> float:
        """Of drawing from so many rows, which the recording holds, too."""
        logits = torch.randn(batch, self.spec.vocabulary_size, device=self._device)
        row = torch.arange(batch, device=self._device)
        asks = DrawTensors(
            temperature_R=torch.full((batch,), SAMPLED.temperature, device=self._device),
            top_k_R=torch.zeros(batch, dtype=torch.int32, device=self._device),
            top_p_R=torch.full((batch,), SAMPLED.top_p, dtype=torch.float64, device=self._device),
            min_p_R=torch.zeros(batch, dtype=torch.float64, device=self._device),
            key_R=row,
        )
        return seconds(lambda: self._ops.draw(logits, asks), self._device, 10)

    def prefill(self, n_prompts: int, n_tokens: int, limits: Limits, n_runs: int = 4) -> Prefilled:
        """Whole prompts in one step."""
        n_each = -(-n_tokens // BLOCK_SIZE)
        chunks = tuple(
            Chunk(
                sequence_id=s,
                token_ids=(7,) * n_tokens,
                start=0,
                block_ids=tuple(range(s * n_each, (s + 1) * n_each)),
                sample=Sample(params=SAMPLED, seeds=(s,), output_index=0),
            )
            for s in range(n_prompts)
        )
        plan = StepPlan(step=0, copies=(), chunks=chunks)
        times = []
        for _ in range(n_runs):
            self._synchronize()
            begun_at = perf_counter()
            self.runner.begin(plan).result()
            times.append(perf_counter() - begun_at)
        step_s = min(times[1:])
        n_pairs = n_prompts * n_tokens * (n_tokens + 1) // 2
        operations = self.costs.operations(n_prompts * n_tokens, n_pairs, n_prompts)
        ratio = operations / step_s / limits.operations_per_s
        return Prefilled(n_prompts=n_prompts, n_tokens=n_tokens, step_s=step_s, ratio=ratio)

    def serve(self, prompts: Sequence[Sequence[int]], n_output: int) -> Served:
        """All prompts to their last token, greedily, two steps in flight."""
        capacity = Capacity(
            n_blocks=self.n_blocks,
            block_size=BLOCK_SIZE,
            max_step_tokens=self._max_step_tokens,
            max_sequences=self._max_sequences,
            max_flights=2,
        )
        policy = SchedulingPolicy(max_model_len=self.max_model_len, max_prefill_tokens=self._max_step_tokens)
        scheduler = Scheduler(capacity=capacity, policy=policy, model_digest="benchmark", hash_key=b"")
        params = SamplingParams(temperature=0.0, max_tokens=n_output, seed=0)
        self._synchronize()
        served, begun_at = Served(), perf_counter()
        for index, prompt in enumerate(prompts):
            scheduler.add(Request(request_id=str(index), prompt_ids=tuple(prompt), params=params), 0.0)
        flights: deque[Pending] = deque()
        while scheduler.has_work:
            self._step(scheduler, flights, len(prompts), served)
        served.total_s = perf_counter() - begun_at
        return served

    def _step(self, scheduler: Scheduler, flights: deque[Pending], n_prompts: int, served: Served) -> None:
        begun_at = perf_counter()
        plan = scheduler.plan(begun_at)
        planned_at = perf_counter()
        is_decode = plan is not None and sum(len(chunk.token_ids) for chunk in plan.chunks) == n_prompts
        if plan is not None:
            flights.append(self.runner.begin(plan))
        launched_at = waited_at = published_at = perf_counter()
        if flights and (plan is None or len(flights) == 2):
            result = flights.popleft().result()
            waited_at = perf_counter()
            deltas = scheduler.apply(result, waited_at)
            served.n_output += sum(len(delta.token_ids) for delta in deltas)
            published_at = perf_counter()
        if is_decode:
            served.plan_s.append(planned_at - begun_at)
            served.begin_s.append(launched_at - planned_at)
            served.wait_s.append(waited_at - launched_at)
            served.publish_s.append(published_at - waited_at)
            served.step_s.append(published_at - begun_at)

    def breakdown(self, served: Served, batch: int, context: int, decoded: Decoded) -> dict[str, float]:
        """Milliseconds of the parts of a step in which all sequences decode, and the device's idle share."""
        parts = {
            "plan": median(served.plan_s),
            "launch": median(served.begin_s),
            "device": decoded.device_s,
            "sample (in device)": self.draw_seconds(batch),
            "publish": median(served.publish_s),
            "wait": median(served.wait_s),
            "step": median(served.step_s),
        }
        found = {name: 1e3 * value for name, value in parts.items()}
        return found | {"idle share": max(0.0, 1 - parts["device"] / parts["step"]), "context": float(context)}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def decode_plans(batch: int, context: int, n_steps: int) -> list[StepPlan]:
    """Of sequences that decode together, as the scheduler plans them: a table is the same object until it grows.

    The runner knows it again by that, and would else take longer to launch a step than it does in serving.
    """
    n_each = -(-(context + n_steps + 1) // BLOCK_SIZE)
    samples = [Sample(params=SAMPLED, seeds=(s,), output_index=0) for s in range(batch)]
    plans, tables = [], [tuple[int, ...]()] * batch
    for step in range(n_steps):
        n_blocks = -(-(context + step) // BLOCK_SIZE)
        if len(tables[0]) != n_blocks:
            tables = [tuple(range(s * n_each, s * n_each + n_blocks)) for s in range(batch)]
        chunks = tuple(
            Chunk(
                sequence_id=s,
                token_ids=(0,),
                start=context + step - 1,
                block_ids=tables[s],
                sample=samples[s],
                follows_draw=step > 0,
            )
            for s in range(batch)
        )
        plans.append(StepPlan(step=step, copies=(), chunks=chunks))
    return plans


def decoded_record(decoded: Decoded) -> dict[str, float]:
    """For JSON."""
    return asdict(decoded) | {"ratio": decoded.ratio, "idle_share": decoded.idle_share}
