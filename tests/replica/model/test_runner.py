"""The runner: a plan in, tokens and scores out, nothing kept but the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import BlockCopy, Chunk, Draw, Sample, Sampled, Score, StepPlan, TokenLogprob
from bakehouse_replica.model.batch import build_batch, flatten
from bakehouse_replica.model.constraint import Constraint, ConstraintFailure, ConstraintSource
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.logprobs import token_logprobs
from bakehouse_replica.model.runner import Runner
from bakehouse_replica.model.sampler import draw
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, LayerWeights
from torch import Tensor

CPU = torch.device("cpu")
SPEC = ModelSpec(
    n_layers=1,
    hidden_size=16,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    feed_forward_size=24,
    vocabulary_size=50,
    context_length=64,
    norm_eps=1e-5,
    rope_frequencies=(1.0, 0.1, 0.01, 0.001),
    has_tied_head=True,
)
PROMPT = (3, 1, 4, 1, 5, 9, 2)
BLOCKS = (5, 2)


@pytest.fixture
def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    layer = LayerWeights(
        attention_norm_E=torch.ones(16),
        qkv_EX=random(16, 32),
        output_QE=random(16, 16),
        feed_forward_norm_E=torch.ones(16),
        gate_up_EF2=random(16, 48),
        down_FE=random(24, 16),
    )
    embedding_VE = random(50, 16)
    weights = DecoderWeights(
        embedding_VE=embedding_VE, layers=(layer,), final_norm_E=torch.ones(16), head_VE=embedding_VE
    )
    return Decoder(SPEC, weights, ReferenceOps())


def new_cache() -> KVCache:
    return ReferenceOps().new_cache(n_layers=1, n_blocks=8, block_size=4, n_kv_heads=1, head_dim=8)


def runner_of(decoder: Decoder, cache: KVCache, constraints: ConstraintSource | None = None) -> Runner:
    return Runner(decoder=decoder, cache=cache, ops=ReferenceOps(), device=CPU, constraints=constraints)


def prompt_logits(decoder: Decoder) -> Tensor:
    """A row for each token of the prompt."""
    chunk = prompt_chunk((0,), SamplingParams())
    return decoder.logits(decoder.forward(build_batch(flatten((chunk,)), block_size=4, device=CPU), new_cache()))


def prompt_chunk(seeds: tuple[int, ...], params: SamplingParams) -> Chunk:
    sample = Sample(params=params, seeds=seeds, output_index=0)
    return Chunk(sequence_id=8, token_ids=PROMPT, start=0, block_ids=BLOCKS, sample=sample)


def plan_of(*chunks: Chunk, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(step=0, copies=copies, chunks=chunks)


def test_the_noise_is_that_of_the_position_where_the_new_token_will_stand(decoder: Decoder) -> None:
    chunk = prompt_chunk((11, 12, 13), SamplingParams(temperature=2.0))
    assert chunk.sample is not None
    (draws,) = draw(ReferenceOps(), prompt_logits(decoder)[-1:], [chunk.sample], [len(PROMPT)])
    found = runner_of(decoder, new_cache()).run(plan_of(chunk))
    assert found == ((Sampled(sequence_id=8, draws=draws),), ())


def test_warming_up_changes_no_result(decoder: Decoder) -> None:
    chunk = prompt_chunk((1, 2), SamplingParams(temperature=1.0))
    warm = runner_of(decoder, new_cache())
    warm.warm_up()
    assert warm.run(plan_of(chunk)) == runner_of(decoder, new_cache()).run(plan_of(chunk))


def test_a_plan_of_copies_alone_copies_every_layer_s_keys_and_values(decoder: Decoder) -> None:
    cache = new_cache()
    runner = runner_of(decoder, cache)
    runner.run(plan_of(prompt_chunk((1,), SamplingParams())))
    copies = (BlockCopy(source=5, target=0), BlockCopy(source=2, target=7))
    assert runner.run(plan_of(copies=copies)) == ((), ())
    for tensors in (cache.key, cache.value):
        assert torch.equal(tensors[0][0], tensors[0][5])
        assert torch.equal(tensors[0][7, :3], tensors[0][2, :3])


def scored_chunk(start: int, end: int, first_row: int, n_top: int, sample: Sample | None = None) -> Chunk:
    """The prompt from `start` to `end`, scored from one row on to the chunk's end."""
    targets = PROMPT[start + first_row + 1 : end + 1]
    return Chunk(
        sequence_id=8,
        token_ids=PROMPT[start:end],
        start=start,
        block_ids=BLOCKS[: -(-end // 4)],
        sample=sample,
        score=Score(first_row=first_row, target_ids=targets, n_top=n_top),
    )


@pytest.mark.parametrize("ends", [[6], [2, 6], [1, 2, 3, 4, 5, 6]], ids=str)
@pytest.mark.parametrize("slice_bytes", [1, 2 * 4 * 50, 1 << 20])
def test_prompt_tokens_are_scored_whatever_the_chunks_and_slices(
    decoder: Decoder, ends: list[int], slice_bytes: int
) -> None:
    expected = token_logprobs(ReferenceOps(), prompt_logits(decoder)[:-1], PROMPT[1:], 3)
    runner = Runner(
        decoder=decoder, cache=new_cache(), ops=ReferenceOps(), device=CPU, score_slice_bytes=slice_bytes
    )
    found: list[TokenLogprob] = []
    for start, end in pairwise([0, *ends]):
        sampled, (scored,) = runner.run(plan_of(scored_chunk(start, end, 0, 3)))
        assert sampled == ()
        assert scored.sequence_id == 8
        found += scored.logprobs
    assert_logprobs_close(found, expected)


def test_a_chunk_may_score_some_of_its_rows_and_draw_after_the_last(decoder: Decoder) -> None:
    logits_TV = prompt_logits(decoder)
    sample = Sample(params=SamplingParams(temperature=0.0), seeds=(0,), output_index=0)
    chunk = scored_chunk(0, 7, 2, 1, sample)
    other = replace(prompt_chunk((4,), SamplingParams(temperature=0.0)), sequence_id=9, block_ids=(0, 1))
    sampled, scored = runner_of(decoder, new_cache()).run(plan_of(other, chunk))
    best = Draw(token_ids=(int(logits_TV[-1].argmax()),))
    assert sampled == (Sampled(sequence_id=9, draws=(best,)), Sampled(sequence_id=8, draws=(best,)))
    assert [(one.sequence_id, len(one.logprobs)) for one in scored] == [(8, 4)]
    assert_logprobs_close(scored[0].logprobs, token_logprobs(ReferenceOps(), logits_TV[2:6], PROMPT[3:], 1))


def test_of_chunks_of_one_token_only_those_that_ask_draw(decoder: Decoder) -> None:
    runner = runner_of(decoder, new_cache())
    asking = prompt_chunk((0,), SamplingParams(temperature=0.0))
    silent = replace(asking, sequence_id=9, block_ids=(0, 1), token_ids=PROMPT[::-1])
    first, last = (
        [replace(chunk, token_ids=chunk.token_ids[begin:end], start=begin) for chunk in (silent, asking)]
        for begin, end in ((0, 6), (6, 7))
    )
    runner.run(plan_of(*(replace(chunk, sample=None) for chunk in first)))

    found = runner.run(plan_of(replace(last[0], sample=None), last[1]))

    best = Draw(token_ids=(int(prompt_logits(decoder)[-1].argmax()),))
    assert found == ((Sampled(sequence_id=8, draws=(best,)),), ())


def assert_logprobs_close(found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    """Equal ranks and ids; values within 1e-5: float32 sums in another order, of logits below 10."""
    assert [(one.rank, [id_ for id_, _ in one.top]) for one in found] == [
        (one.rank, [id_ for id_, _ in one.top]) for one in expected
    ]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-5)


class OneLetter:
    """A source that allows each sequence one token, which its id names, and is broken for odd ones."""

    def prepare(self, params: SamplingParams) -> None:
        """Nothing to compile."""

    def constraint(self, sequence_id: int, sample: Sample) -> Constraint | None:
        if sequence_id % 2:
            raise ConstraintFailure(f"broken after {sample.output_ids}")
        return OneToken(sequence_id)


@dataclass(frozen=True)
class OneToken:
    token_id: int

    def allowed(self, n_vocabulary: int) -> Tensor:
        return torch.arange(n_vocabulary) == self.token_id

    def is_complete_after(self, token_id: int) -> bool:
        return token_id == self.token_id


def test_each_sequence_has_its_own_constraint_and_a_broken_one_fails_alone(decoder: Decoder) -> None:
    params = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="x"))
    chunks = [
        replace(prompt_chunk((1,), params), sequence_id=sequence_id, block_ids=(2 * row, 2 * row + 1))
        for row, sequence_id in enumerate((20, 31, 40))
    ]
    sampled, _ = runner_of(decoder, new_cache(), OneLetter()).run(plan_of(*chunks))
    assert [one.draws for one in sampled] == [
        (Draw(token_ids=(20,), is_complete=True),),
        (Draw(token_ids=(), failure="broken after ()"),),
        (Draw(token_ids=(40,), is_complete=True),),
    ]
