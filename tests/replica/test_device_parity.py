"""Greedy ids are those of the reference on every path of devices, under all that scheduling does at once.

Chunked prefills, blocks found again, forks into four that copy what they share, and preemption, in one crowd on a
pool that is too small for it: on the CPU's path, on the runner of GPUs by the reference's operations and by
Triton's interpreted kernels, whether steps overlap, and on one rank or two.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import select_ops
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import Capacity, FinishReason, Request, SchedulingPolicy, StepPlan, TokenDelta
from bakehouse_replica.executors.device_model import device_model
from bakehouse_replica.executors.in_process import InProcessExecutor, build_executor
from bakehouse_replica.executors.on_device import DeviceExecutor, build_device_executor
from bakehouse_replica.executors.step_sizes import StepSizes
from bakehouse_replica.executors.tensor_parallel import gather
from bakehouse_replica.model.collective import Alone, Collective
from bakehouse_replica.model.dummy_weights import dummy_tensors
from bakehouse_replica.model.sharding import Shard, local_spec
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, assembled
from ranks import leader_of, part_of

P = ParamSpec("P")
R = TypeVar("R")

CPU = torch.device("cpu")
BLOCK_SIZE, N_BLOCKS, MAX_MODEL_LEN = 4, 14, 32
SIZES = StepSizes(max_step_tokens=12, max_sequences=8, max_prefill_tokens=6)
SPEC = ModelSpec(
    n_layers=2,
    hidden_size=32,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    feed_forward_size=48,
    vocabulary_size=200,
    context_length=MAX_MODEL_LEN,
    norm_eps=1e-5,
    rope_frequencies=tuple(0.3**i for i in range(8)),
)
COMMON = tuple(range(20, 33))  # three blocks, and one token of a fourth


def request(
    name: str, prompt: tuple[int, ...], *, n: int = 1, priority: int = 0, is_penalised: bool = False
) -> Request:
    penalty = 1.4 if is_penalised else 1.0
    params = SamplingParams(
        temperature=0.0,
        max_tokens=7,
        seed=0,
        n=n,
        repetition_penalty=penalty,
        presence_penalty=0.5 if is_penalised else 0.0,
    )
    return Request(request_id=name, prompt_ids=prompt, params=params, priority=priority)


# By the step before which they come.
ARRIVALS = {
    0: [request("four", COMMON, n=4)],
    2: [request("long", tuple(range(60, 82)))],
    3: [request("shares", (*COMMON[:12], 7, 8, 9, 10)), request("penalised", (5, 5, 9, 5), is_penalised=True)],
    6: [request("urgent", (*COMMON[:8], 90, 91), priority=-1)],
}


@cache
def weights() -> DecoderWeights:
    return assembled(dummy_tensors(SPEC, dtype=torch.float32, device=CPU), SPEC)


def capacity(n_blocks: int, max_flights: int) -> Capacity:
    return Capacity(
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        max_step_tokens=SIZES.max_step_tokens,
        max_sequences=SIZES.max_sequences,
        max_flights=max_flights,
    )


@dataclass
class Crowd:
    """Serves requests on an executor, two steps in flight where it lets them, and counts what scheduling did."""

    executor: Executor
    output_ids: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    n_preemptions: int = 0
    n_partial_prefills: int = 0
    n_copies: int = 0
    n_ahead: int = 0
    _reached: dict[int, int] = field(default_factory=dict)

    def serve(self, arrivals: dict[int, list[Request]]) -> "Crowd":
        """All to their ends, with an audit after every event."""
        scheduler = Scheduler(
            capacity=self.executor.capacity,
            policy=SchedulingPolicy(max_model_len=MAX_MODEL_LEN, max_prefill_tokens=SIZES.max_prefill_tokens),
            model_digest="",
            hash_key=b"",
        )
        flights: deque[Pending] = deque()
        step = 0
        while step <= max(arrivals) or scheduler.has_work:
            for one in arrivals.get(step, ()):
                scheduler.add(one, float(step))
            plan = scheduler.plan(float(step))
            scheduler.check()
            if plan is not None:
                self._count(plan)
                self.n_ahead += bool(flights)
                flights.append(self.executor.begin(plan))
            if flights and (plan is None or len(flights) == self.executor.capacity.max_flights):
                self._book(scheduler.apply(flights.popleft().result(), float(step)))
                scheduler.check()
            step += 1
        assert scheduler.load().n_held_blocks == 0
        self.executor.close()
        return self

    def _count(self, plan: StepPlan) -> None:
        self.n_copies += len(plan.copies)
        for chunk in plan.chunks:
            # A sequence goes back only where its blocks were taken from it.
            self.n_preemptions += chunk.start < self._reached.get(chunk.sequence_id, 0)
            self._reached[chunk.sequence_id] = chunk.start + len(chunk.token_ids)
            self.n_partial_prefills += chunk.sample is None

    def _book(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            place = (delta.request_id, delta.choice)
            assert delta.start == len(self.output_ids.get(place, ()))
            self.output_ids[place] = self.output_ids.get(place, ()) + delta.token_ids
            if delta.finish is not None:
                assert delta.finish is FinishReason.LENGTH
                assert delta.usage is not None
                self.cached_tokens[delta.request_id] = delta.usage.cached_tokens


def in_process(ops: Ops, collective: Collective, limits: Capacity) -> InProcessExecutor:
    shard = Shard(collective.rank, collective.size)
    return build_executor(
        spec=local_spec(SPEC, shard),
        weights=part_of(weights(), SPEC, shard),
        ops=ops,
        capacity=limits,
        collective=collective,
    )


def on_device(ops: Ops, collective: Collective, limits: Capacity) -> DeviceExecutor:
    shard = Shard(collective.rank, collective.size)
    model = device_model(
        local_spec(SPEC, shard),
        part_of(weights(), SPEC, shard),
        ops,
        collective,
        block_size=limits.block_size,
        max_model_len=MAX_MODEL_LEN,
        sizes=SIZES,
    )
    return build_device_executor(model, n_blocks=limits.n_blocks, max_flights=limits.max_flights)


_INTERPRETER = Lock()  # Triton's interpreter is one for all threads, of which each rank is one here


def interpreted() -> Ops:
    from bakehouse_kernels.triton.ops import TritonOps  # after the check that it is there

    def alone(operation: Callable[P, R]) -> Callable[P, R]:
        @wraps(operation)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            with _INTERPRETER:
                return operation(*args, **kwargs)

        return guarded

    ops = TritonOps(CPU, torch.float32)
    for name in (
        "adjust",
        "copy_blocks",
        "draw",
        "gated_linear",
        "paged_attention",
        "rms_norm",
        "rope_and_write",
        "survey",
    ):
        setattr(ops, name, alone(getattr(ops, name)))
    return ops


Make = Callable[[Collective, Capacity], InProcessExecutor | DeviceExecutor]

PATHS: dict[str, Make] = {
    "reference": lambda collective, limits: in_process(ReferenceOps(), collective, limits),
    "cpu": lambda collective, limits: in_process(select_ops(CPU, torch.float32, 1), collective, limits),
    "device": lambda collective, limits: on_device(ReferenceOps(), collective, limits),
    "triton": lambda collective, limits: on_device(interpreted(), collective, limits),
}


@cache
def expected() -> dict[tuple[str, int], tuple[int, ...]]:
    """Each request by itself, with room for all of it, by the reference."""
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for one in (one for arriving in ARRIVALS.values() for one in arriving):
        alone = Crowd(PATHS["reference"](Alone(), capacity(64, 1))).serve({0: [one]})
        found |= alone.output_ids
    return found


# Interpreted kernels take seconds: with them each way is gone once, not every pair of ways.
WAYS = [
    pytest.param(path, max_flights, n_ranks, id=f"{path}, {max_flights} in flight, {n_ranks} ranks")
    for path in PATHS
    for max_flights in (1, 2)
    for n_ranks in (1, 2)
    if path != "triton" or max_flights == n_ranks
]


@pytest.mark.parametrize(("path", "max_flights", "n_ranks"), WAYS)
def test_greedy_ids_are_the_references_whatever_happens_at_once(path: str, max_flights: int, n_ranks: int) -> None:
    if path == "triton":
        pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")
    limits = capacity(N_BLOCKS, max_flights)

    def load(collective: Collective) -> InProcessExecutor | DeviceExecutor:
        return PATHS[path](collective, limits)

    executor: Executor = load(Alone()) if n_ranks == 1 else gather(leader_of(n_ranks, load), load)
    crowd = Crowd(executor).serve(ARRIVALS)
    print(
        f"{crowd.n_preemptions} preemptions, {crowd.n_partial_prefills} partial prefills, "
        f"{crowd.n_copies} copies, {sum(crowd.cached_tokens.values())} cached tokens, "
        f"{crowd.n_ahead} steps planned ahead"
    )
    assert crowd.n_preemptions > 0
    assert crowd.n_partial_prefills > 0
    assert crowd.n_copies > 0
    assert sum(crowd.cached_tokens.values()) > 0
    assert (crowd.n_ahead > 0) == (max_flights > 1)
    assert crowd.output_ids == expected()
    assert len(crowd.output_ids) == 4 + 4
