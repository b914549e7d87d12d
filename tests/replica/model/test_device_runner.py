"""The runner of devices does what the host's does: by recordings, padded, begun before results are in."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from bakehouse_kernels.api import Ops, Recording
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.executor import Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Capacity, Chunk, Sample, Score, StepPlan, StepResult
from bakehouse_replica.executors.device_model import DeviceModel
from bakehouse_replica.executors.in_process import InProcessExecutor
from bakehouse_replica.executors.on_device import build_device_executor
from bakehouse_replica.model.buckets import Buckets
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.device_runner import DeviceRunner, StepLimits
from bakehouse_replica.model.dummy_weights import dummy_tensors
from bakehouse_replica.model.runner import Runner
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import assembled
from executors import random_model
from torch import Tensor

CPU = torch.device("cpu")
BLOCK_SIZE = 4
N_BLOCKS = 48
NULL_BLOCK = N_BLOCKS
BUCKETS = Buckets((1, 2, 4, 8), (4, 16))
MAX_SEQUENCES = 10

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05, top_k=40),
)
HOST_PARAMS = (
    SamplingParams(temperature=1.0, logprobs=2),
    SamplingParams(temperature=0.5, logit_bias=((7, 2.0),)),
)


class AsCaptured(ReferenceOps):
    """Does what it records once beforehand, as a GPU's operations do."""

    def record(self, work: Callable[[Ops], Tensor]) -> Recording:
        work(self)
        return super().record(work)


def new_cache(n_blocks: int) -> KVCache:
    """Poisoned: whoever reads what nobody has written gets NaN."""
    spec, _ = random_model()
    cache = ReferenceOps().new_cache(
        n_layers=spec.n_layers,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
    )
    for tensor in (*cache.key, *cache.value):
        tensor.fill_(torch.nan)
    return cache


def decoder() -> Decoder:
    spec, weights = random_model()
    return Decoder(spec, weights, ReferenceOps())


def host_executor() -> InProcessExecutor:
    runner = Runner(decoder=decoder(), cache=new_cache(N_BLOCKS), ops=ReferenceOps(), device=CPU)
    capacity = Capacity(
        n_blocks=N_BLOCKS, block_size=BLOCK_SIZE, max_step_tokens=64, max_sequences=MAX_SEQUENCES, max_flights=2
    )
    return InProcessExecutor(runner=runner, capacity=capacity)


def device_runner(cache: KVCache, *, records: bool = True) -> DeviceRunner:
    runner = DeviceRunner(
        decoder=decoder(),
        cache=cache,
        ops=AsCaptured(),
        device=CPU,
        limits=StepLimits(max_tokens=64, max_sequences=MAX_SEQUENCES),
        buckets=BUCKETS,
    )
    if records:
        runner.graphs.record()
    return runner


@dataclass
class Text:
    """One sequence that decodes; `blocks` are its own."""

    sequence_id: int
    params: SamplingParams
    blocks: tuple[int, ...]
    ids: list[int]
    n_written: int = 0

    def chunk(self, n_tokens: int, *, ahead: bool) -> Chunk:
        """The next tokens; `ahead`: the one that the step in flight draws, which nobody knows yet."""
        end = self.n_written + n_tokens
        known = len(self.ids) + (1 if ahead else 0)
        sample = None
        if end == known:
            sample = Sample(params=self.params, seeds=(self.sequence_id,), output_index=0)
        return Chunk(
            sequence_id=self.sequence_id,
            token_ids=(0,) if ahead else tuple(self.ids[self.n_written : end]),
            start=self.n_written,
            block_ids=self.blocks[: -(-end // BLOCK_SIZE)],
            sample=sample,
            follows_draw=ahead,
        )


@dataclass
class Workload:
    """Sequences that come, are prefilled by pieces and decode, the same for every runner."""

    params: tuple[SamplingParams, ...]
    overlaps: bool
    n_steps: int = 14
    max_texts: int = MAX_SEQUENCES
    random: Random = field(default_factory=lambda: Random(3))

    def run(self, begin: Callable[[StepPlan], Pending]) -> dict[int, list[int]]:
        """The ids of each sequence after all steps."""
        texts: list[Text] = []
        flights: list[Pending] = []
        for step in range(self.n_steps):
            for _ in range(self.random.randint(0, 2)):
                if len(texts) < self.max_texts:
                    texts.append(self._text(len(texts)))
            chunks, in_flight = [], bool(flights)
            for text in texts:
                n_known = len(text.ids) - text.n_written
                ahead = in_flight and n_known == 0
                n_tokens = 1 if ahead else min(self.random.randint(1, 5), n_known)
                if len(text.ids) + 1 < 4 * BLOCK_SIZE and n_tokens:
                    chunks.append(text.chunk(n_tokens, ahead=ahead))
            flights.append(begin(StepPlan(step=step, copies=(), chunks=tuple(chunks))))
            for chunk in chunks:
                texts[chunk.sequence_id].n_written += len(chunk.token_ids)
            if not self.overlaps or len(flights) == 2:
                self._take(flights.pop(0).result(), texts)
        for pending in flights:
            self._take(pending.result(), texts)
        return {text.sequence_id: text.ids for text in texts}

    def _text(self, sequence_id: int) -> Text:
        random = Random(sequence_id)
        ids = [random.randrange(200) for _ in range(random.randint(1, 6))]
        blocks = tuple(range(4 * sequence_id, 4 * sequence_id + 4))
        return Text(sequence_id, self.params[sequence_id % len(self.params)], blocks, ids)

    def _take(self, result: StepResult, texts: list[Text]) -> None:
        for sampled in result.sampled:
            texts[sampled.sequence_id].ids.append(sampled.draws[0].token_ids[0])


@pytest.mark.parametrize("records", [True, False], ids=["recorded", "called"])
@pytest.mark.parametrize("params", [PARAMS, PARAMS + HOST_PARAMS], ids=["device", "mixed"])
def test_ids_equal_those_of_the_host_s_runner(params: tuple[SamplingParams, ...], records: bool) -> None:
    expected = Workload(params, overlaps=False).run(host_executor().begin)
    runner = device_runner(new_cache(N_BLOCKS + 1), records=records)
    found = Workload(params, overlaps=False).run(runner.begin)
    assert found == expected
    assert sum(map(len, found.values())) > 60


@pytest.mark.parametrize("params", [PARAMS, PARAMS + HOST_PARAMS], ids=["device", "mixed"])
@pytest.mark.parametrize(
    "make", [lambda: device_runner(new_cache(N_BLOCKS + 1)), host_executor], ids=["device", "host"]
)
def test_steps_begun_before_the_last_result_is_taken_give_the_same_ids(
    make: Callable[[], DeviceRunner | InProcessExecutor], params: tuple[SamplingParams, ...]
) -> None:
    ahead = Workload(params, overlaps=True).run(make().begin)
    behind = Workload(params, overlaps=False).run(host_executor().begin)
    assert sum(map(len, ahead.values())) > 60
    for sequence_id in ahead.keys() & behind.keys():
        # The two plan other chunks, and so end at other lengths; what each row yields is the same.
        n_common = min(len(ahead[sequence_id]), len(behind[sequence_id]))
        assert ahead[sequence_id][:n_common] == behind[sequence_id][:n_common]


def decode_chunks(n_rows: int) -> tuple[Chunk, ...]:
    """First tokens of as many sequences."""
    return tuple(
        Chunk(
            sequence_id=s,
            token_ids=(3 + s,),
            start=0,
            block_ids=(5 * s,),
            sample=Sample(params=PARAMS[s % 2], seeds=(s,), output_index=0),
        )
        for s in range(n_rows)
    )


@pytest.mark.parametrize("n_rows", [1, 3, 5, 7, 8])
def test_a_padded_step_writes_its_own_blocks_and_the_null_block_alone(n_rows: int) -> None:
    cache = new_cache(N_BLOCKS + 1)
    runner = device_runner(cache)
    for tensor in (*cache.key, *cache.value):
        tensor.fill_(torch.nan)  # recording wrote, too
    result = runner.begin(StepPlan(step=0, copies=(), chunks=decode_chunks(n_rows))).result()
    written = {
        block
        for tensor in (*cache.key, *cache.value)
        for block in (~tensor.isnan()).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    }
    own = {5 * s for s in range(n_rows)}
    assert written == (own if n_rows in BUCKETS.rows else own | {NULL_BLOCK})
    expected = host_executor().begin(StepPlan(step=0, copies=(), chunks=decode_chunks(n_rows))).result()
    assert result.sampled == expected.sampled


def test_recording_writes_the_null_block_alone() -> None:
    """Whatever a step of another size has left where inputs are staged."""
    cache = new_cache(N_BLOCKS + 1)
    runner = device_runner(cache, records=False)
    sample = Sample(params=PARAMS[3], seeds=(0,), output_index=0)
    prompts = (tuple(range(1, 1 + 3 * n)) for n in range(1, 5))
    chunks = tuple(
        Chunk(sequence_id=n, token_ids=ids, start=0, block_ids=tuple(range(4 * n, 4 * n + 3)), sample=sample)
        for n, ids in enumerate(prompts)
    )
    runner.rehearse(StepPlan(step=0, copies=(), chunks=chunks))
    before = [tensor[:NULL_BLOCK].clone() for tensor in (*cache.key, *cache.value)]
    runner.graphs.record()
    for tensor, old in zip((*cache.key, *cache.value), before, strict=True):
        assert torch.equal(tensor[:NULL_BLOCK].nan_to_num(), old.nan_to_num())


def test_scores_forks_and_copies_equal_those_of_the_host_s_runner() -> None:
    prompt = (5, 9, 2, 11, 4, 8)
    chunk = Chunk(
        sequence_id=1,
        token_ids=prompt,
        start=0,
        block_ids=(3, 9),
        sample=Sample(params=PARAMS[1], seeds=(4, 5, 6), output_index=0),
        score=Score(first_row=0, target_ids=prompt[1:], n_top=2),
    )
    copied = Chunk(
        sequence_id=2,
        token_ids=(7,),
        start=6,
        block_ids=(3, 10),
        sample=Sample(params=PARAMS[0], seeds=(1,), output_index=1),
    )
    plans = (
        StepPlan(step=0, copies=(), chunks=(chunk,)),
        StepPlan(step=1, copies=(BlockCopy(source=9, target=10),), chunks=(copied,)),
        StepPlan(step=2, copies=(BlockCopy(source=10, target=11),), chunks=()),
        StepPlan(step=3, copies=(), chunks=(replace(copied, block_ids=(3, 11)),)),
    )
    host, device = host_executor(), device_runner(new_cache(N_BLOCKS + 1))
    for plan in plans:
        expected, found = host.begin(plan).result(), device.begin(plan).result()
        assert (found.step, found.sampled, found.scored) == (expected.step, expected.sampled, expected.scored)


def test_a_row_without_a_finite_maximum_is_an_error_where_the_result_is_taken() -> None:
    cache = new_cache(N_BLOCKS + 1)
    pending = device_runner(cache).begin(
        StepPlan(step=0, copies=(), chunks=(replace(decode_chunks(1)[0], start=1),))  # reads a slot nobody wrote
    )
    with pytest.raises(AssertionError, match="sequence 0 have no finite maximum"):
        pending.result()


def test_a_step_that_follows_a_row_without_a_finite_maximum_embeds_a_token_that_there_is() -> None:
    """The device says -1 for it, and the host hears of that only where it takes the first result."""
    cache = new_cache(N_BLOCKS + 1)
    runner = device_runner(cache)
    failing, sound = (replace(chunk, start=start) for chunk, start in zip(decode_chunks(2), (1, 0), strict=True))
    first = runner.begin(StepPlan(step=0, copies=(), chunks=(failing, sound)))
    assert runner._staging.drawn_R[0] == -1
    later = tuple(
        replace(chunk, token_ids=(0,), start=chunk.start + 1, follows_draw=True) for chunk in (failing, sound)
    )
    runner.begin(StepPlan(step=1, copies=(), chunks=later))
    with pytest.raises(AssertionError, match="sequence 0 have no finite maximum"):
        first.result()


def test_a_step_that_follows_draws_follows_those_of_the_step_before() -> None:
    runner = device_runner(new_cache(N_BLOCKS + 1))
    runner.begin(StepPlan(step=0, copies=(), chunks=decode_chunks(1)))
    chunk = replace(decode_chunks(1)[0], token_ids=(0,), start=1, follows_draw=True)
    with pytest.raises(AssertionError, match="step 2 follows draws of step 0"):
        runner.begin(StepPlan(step=2, copies=(), chunks=(chunk,)))


def test_interpreted_kernels_under_it_give_the_ids_of_the_reference() -> None:
    """The path that GPUs serve, by recordings and overlapping steps, on a tiny Qwen3 of dummy weights."""
    pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")
    from bakehouse_kernels.triton.ops import TritonOps  # after the check

    spec = ModelSpec(
        n_layers=2,
        hidden_size=32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        feed_forward_size=48,
        vocabulary_size=200,
        context_length=64,
        norm_eps=1e-5,
        rope_frequencies=tuple(0.3**i for i in range(8)),
        has_qk_norm=True,
        has_tied_head=True,
    )
    found = []
    for ops in (ReferenceOps(), TritonOps(CPU, torch.float32)):
        tensors = dummy_tensors(spec, dtype=torch.float32, device=CPU)
        model = DeviceModel(
            spec=spec,
            decoder=Decoder(spec, assembled(tensors, spec), ops),
            ops=ops,
            device=CPU,
            block_size=BLOCK_SIZE,
            max_model_len=4 * BLOCK_SIZE,
            max_step_tokens=24,
            max_sequences=4,
        )
        executor = build_device_executor(model, n_blocks=N_BLOCKS, max_flights=2)
        found.append(Workload(PARAMS, overlaps=True, n_steps=8, max_texts=4).run(executor.begin))
    assert found[0] == found[1]
    assert sum(map(len, found[0].values())) > 20
