"""The executor that runs a model: its log-probabilities are transformers' own, its draws are each row's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.executor import Executor, execute
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import Chunk, Sample, Score, StepPlan, TokenLogprob
from bakehouse_replica.model.constraint import Constraint
from decoding import BLOCK_SIZE, executor_of, open_model
from tiny_llama import N_TOKENS, random_model, tiny_config
from torch import Tensor

PROMPT = tuple(Random(1).choices(range(N_TOKENS), k=40))
# float32 sums in another order, of logits that reach 10; the decoder's own tests allow as much.
TOLERANCE = 1e-4


@dataclass
class CountingSource:
    """Counts what it is asked to compile."""

    prepared: list[SamplingParams] = field(default_factory=list)

    def prepare(self, params: SamplingParams) -> None:
        self.prepared.append(params)

    def constraint(self, sequence_id: int, sample: Sample) -> Constraint | None:
        return None


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products on one thread: two that wait for each other on busy cores took ten times as long."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def executor(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return executor_of(open_model(tiny_llama_folder, tmp_path_factory.mktemp("cache")), n_blocks=200)


@pytest.fixture(scope="module")
def logprobs_TV() -> Tensor:
    """transformers' log-softmax after each token of the prompt."""
    with torch.inference_mode():
        logits_TV: Tensor = random_model(tiny_config())(torch.tensor([PROMPT])).logits[0].float()
        return logits_TV.log_softmax(dim=-1)


def chunk_of(
    tokens: Sequence[int],
    *,
    start: int = 0,
    row: int = 0,
    sample: Sample | None = None,
    score: Score | None = None,
) -> Chunk:
    """Positions from `start` to the end of `tokens`, in blocks that belong to `row` alone."""
    n_blocks = -(-len(tokens) // BLOCK_SIZE)
    return Chunk(
        sequence_id=row,
        token_ids=tuple(tokens[start:]),
        start=start,
        block_ids=tuple(range(12 * row, 12 * row + n_blocks)),
        sample=sample,
        score=score,
    )


def prompt_logprobs(executor: Executor, n_top: int, ends: Sequence[int] = (39,)) -> list[TokenLogprob]:
    """Of each prompt token but the first, computed in chunks with these ends."""
    found: list[TokenLogprob] = []
    for start, end in pairwise((0, *ends)):
        score = Score(first_row=0, target_ids=PROMPT[start + 1 : end + 1], n_top=n_top)
        plan = StepPlan(step=0, copies=(), chunks=(chunk_of(PROMPT[:end], start=start, score=score),))
        result = execute(executor, plan)
        assert result.sampled == ()
        found += result.scored[0].logprobs
    return found


def assert_equal_to_transformers(
    found: Sequence[TokenLogprob], expected_TV: Tensor, token_ids: Sequence[int]
) -> None:
    for one, expected_V, token_id in zip(found, expected_TV, token_ids, strict=True):
        best = expected_V.topk(max(1, len(one.top)))
        assert one.logprob == pytest.approx(float(expected_V[token_id]), abs=TOLERANCE)
        assert one.rank == 1 + int((expected_V > expected_V[token_id]).sum())
        assert [id_ for id_, _ in one.top] == best.indices.tolist()[: len(one.top)]
        assert [value for _, value in one.top] == pytest.approx(
            best.values.tolist()[: len(one.top)], abs=TOLERANCE
        )


@pytest.mark.parametrize("ends", [[39], [1, 2, 3, 39], [16, 32, 39], [13, 26, 39]], ids=str)
def test_prompt_logprobs_equal_transformers_log_softmax_whatever_the_chunks(
    executor: Executor, logprobs_TV: Tensor, ends: list[int]
) -> None:
    assert_equal_to_transformers(prompt_logprobs(executor, 5, ends), logprobs_TV[:-1], PROMPT[1:])


def test_output_logprobs_equal_transformers_log_softmax_whatever_adjusts_the_draw(
    executor: Executor, logprobs_TV: Tensor
) -> None:
    params = SamplingParams(temperature=1.7, top_k=30, presence_penalty=1.0, logit_bias=((4, 5.0),), logprobs=7)
    sample = Sample(params=params, seeds=tuple(range(20)), output_index=2, output_ids=PROMPT[-2:])
    (sampled,) = execute(executor, StepPlan(step=0, copies=(), chunks=(chunk_of(PROMPT, sample=sample),))).sampled
    drawn_ids = [draw.token_ids[0] for draw in sampled.draws]
    assert len(set(drawn_ids)) > 1
    found = [draw.logprobs[0] for draw in sampled.draws]
    assert_equal_to_transformers(found, logprobs_TV[-1].expand(20, -1), drawn_ids)


def test_c15_the_same_prompt_asked_twice_has_as_many_best_tokens_as_each_time_asked_for(
    executor: Executor,
) -> None:
    three, none, five = (prompt_logprobs(executor, n_top) for n_top in (3, 0, 5))
    assert [{len(one.top) for one in found} for found in (three, none, five)] == [{3}, {0}, {5}]
    assert [one.logprob for one in three] == [one.logprob for one in none] == [one.logprob for one in five]
    assert [one.top for one in three] == [one.top[:3] for one in five]


def generate(executor: Executor, samples: Sequence[Sample], n_tokens: int) -> list[tuple[int, ...]]:
    """The outputs of as many sequences as there are samples, all after the same prompt, in one batch."""
    tokens = [PROMPT[:7] for _ in samples]
    for index in range(n_tokens):
        chunks = tuple(
            chunk_of(
                tokens[row],
                start=0 if index == 0 else 6 + index,
                row=row,
                sample=replace(sample, output_index=index),
            )
            for row, sample in enumerate(samples)
        )
        result = execute(executor, StepPlan(step=index, copies=(), chunks=chunks))
        tokens = [(*ids, *sampled.draws[0].token_ids) for ids, sampled in zip(tokens, result.sampled, strict=True)]
    return [ids[7:] for ids in tokens]


def sample_of(seed: int, params: SamplingParams | None = None) -> Sample:
    return Sample(params=params or SamplingParams(temperature=1.0), seeds=(seed,), output_index=0)


def test_c20_copies_of_a_request_differ_where_their_seeds_do_and_a_seed_is_worth_the_same_in_a_crowd(
    executor: Executor,
) -> None:
    copies = generate(executor, [sample_of(seed) for seed in range(8)], 20)
    assert len(set(copies)) == 8
    (alone,) = generate(executor, [sample_of(77)], 20)
    kinds = (SamplingParams(temperature=0.0), SamplingParams(top_p=0.8, logprobs=3), SamplingParams(min_p=0.1))
    crowd = [sample_of(seed, kinds[seed % 3]) for seed in range(16)]
    for place in (0, 5, 15):
        crowded = generate(executor, [*crowd[:place], sample_of(77), *crowd[place + 1 :]], 20)
        assert crowded[place] == alone


def test_c21_a_bias_on_the_vocabulary_s_last_id_is_honoured_and_leaves_neighbours_alone(
    executor: Executor,
) -> None:
    last = N_TOKENS - 1
    params = SamplingParams(temperature=0.0, logit_bias=((last, 100.0), (0, -100.0)), stop_token_ids=(last,))
    greedy = sample_of(0, SamplingParams(temperature=0.0))
    (alone,) = generate(executor, [greedy], 4)
    assert generate(executor, [greedy, sample_of(0, params), greedy], 4) == [alone, (last,) * 4, alone]


def test_a_grammar_is_refused_where_there_is_none_to_compile_it(executor: Executor) -> None:
    executor.prepare(SamplingParams())
    with pytest.raises(InvalidRequest, match="response_format, structured_outputs") as caught:
        executor.prepare(SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="a")))
    assert caught.value.param == "structured_outputs"


def test_a_grammar_is_compiled_before_the_request_is_added(tiny_llama_folder: Path, tmp_path: Path) -> None:
    source = CountingSource()
    executor = executor_of(open_model(tiny_llama_folder, tmp_path), n_blocks=10, constraints=source)
    constrained = SamplingParams(grammar=Grammar(kind=GrammarKind.REGEX, text="a"))
    executor.prepare(SamplingParams())
    executor.prepare(constrained)
    assert source.prepared == [constrained]


def test_a_prompt_without_output_is_scored_and_nothing_is_drawn(executor: Executor) -> None:
    score = Score(first_row=0, target_ids=PROMPT[1:], n_top=1)  # not of the last row, which predicts output
    result = execute(executor, StepPlan(step=0, copies=(), chunks=(chunk_of(PROMPT, score=score),)))
    assert result.sampled == ()
    assert len(result.scored[0].logprobs) == len(PROMPT) - 1
