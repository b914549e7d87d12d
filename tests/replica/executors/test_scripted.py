"""The scripted executor: which token comes where, and that its cache is checked."""

import math
import threading

import pytest
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.executor import execute
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import Capacity, Chunk, Draw, Sample, Score, StepPlan, StepResult
from bakehouse_replica.executors.scripted import ScriptedExecutor
from bakehouse_replica.script import parse_script

CAPACITY = Capacity(n_blocks=16, block_size=4, max_step_tokens=64, max_sequences=8)
TREE: dict[str, object] = {
    "pieces": ["</s>", "a", "b", "c", "one", "two"],
    "eos": 0,
    "replies": [
        {"when": "one", "pieces": ["a", "b"]},
        {"when": "one|two", "pieces": ["c"]},
    ],
    "default": {"ids": [3, 2, 1]},
}
EOS, A, B, C, ONE, TWO = range(6)
GREEDY = SamplingParams(temperature=0.0, seed=0)


def executor_of(**changes: object) -> ScriptedExecutor:
    return ScriptedExecutor(parse_script(TREE | changes), CAPACITY)


def step(executor: ScriptedExecutor, *chunks: Chunk) -> StepResult:
    return execute(executor, StepPlan(step=0, copies=(), chunks=chunks))


def draws(
    executor: ScriptedExecutor,
    prompt: tuple[int, ...],
    output: tuple[int, ...] = (),
    *,
    params: SamplingParams = GREEDY,
    seeds: tuple[int, ...] = (0,),
    choice: int = 0,
) -> tuple[Draw, ...]:
    """What comes after `output`, all of it computed at once."""
    needs = params.needs_output
    sample = Sample(
        params=params,
        seeds=seeds,
        output_index=len(output),
        choice=choice,
        prompt_ids=prompt if params.has_penalties else (),
        output_ids=output if needs else (),
    )
    tokens = (*prompt, *output)
    blocks = tuple(range(-(-len(tokens) // CAPACITY.block_size)))
    chunk = Chunk(sequence_id=0, token_ids=tokens, start=0, block_ids=blocks, sample=sample)
    return step(executor, chunk).sampled[0].draws


def ids(*args: object, **keywords: object) -> list[tuple[int, ...]]:
    return [draw.token_ids for draw in draws(*args, **keywords)]  # type: ignore[arg-type]


def test_a_reply_is_followed_by_the_number_of_output_tokens() -> None:
    executor = executor_of()
    assert ids(executor, (ONE,)) == [(A,)]
    assert ids(executor, (ONE,), (A,)) == [(B,)]
    assert ids(executor, (ONE,), (C,)) == [(B,)]  # whatever the output was
    assert ids(executor, (ONE,), (A, B)) == [(EOS,)]
    assert ids(executor, (A,), (A, A)) == [(A,)]  # the default's third


def test_children_follow_the_matching_replies_in_turn() -> None:
    executor = executor_of()
    assert ids(executor, (ONE,), seeds=(1, 2, 3)) == [(A,), (C,), (A,)]
    assert ids(executor, (TWO,), seeds=(1, 2)) == [(C,), (C,)]
    assert ids(executor, (ONE,), (A,), choice=2) == [(B,)]
    assert ids(executor, (ONE,), (C,), choice=1) == [(EOS,)]


def test_several_tokens_come_in_one_step_up_to_a_stop_id() -> None:
    executor = executor_of(tokens_per_step=3)
    assert ids(executor, (A,)) == [(C, B, A)]
    ending = SamplingParams(temperature=0.0, seed=0, stop_token_ids=(EOS,), logprobs=1)
    (draw,) = draws(executor, (TWO,), params=ending)
    assert draw.token_ids == (C, EOS)
    assert len(draw.logprobs) == 2


def test_given_log_probabilities_are_what_the_sampler_sees_and_the_rest_is_spread() -> None:
    reply = {"ids": [A], "logprobs": [[[B, -0.5], [C, -1.5]]]}
    executor = executor_of(default=reply)
    (draw,) = draws(executor, (A,), params=SamplingParams(temperature=0.0, seed=0, logprobs=3))
    assert draw.token_ids == (B,)
    (logprob,) = draw.logprobs
    rest = (1 - math.exp(-0.5) - math.exp(-1.5)) / (parse_script(TREE).vocabulary_size - 2)
    assert [token_id for token_id, _ in logprob.top] == [B, C, 0]
    assert [value for _, value in logprob.top] == pytest.approx([-0.5, -1.5, math.log(rest)], abs=1e-5)


def test_preferred_tokens_come_where_the_reply_s_own_is_masked_in_their_order() -> None:
    executor = executor_of(prefer=[[B, A]])
    assert ids(executor, (A,)) == [(C,)]
    masked = SamplingParams(temperature=0.0, seed=0, allowed_token_ids=(A, B, ONE))
    assert ids(executor, (A,), params=masked) == [(B,)]
    masked = SamplingParams(temperature=0.0, seed=0, allowed_token_ids=(A, ONE))
    assert ids(executor, (A,), params=masked) == [(A,)]


def test_preferred_tokens_are_near_ties_at_temperature_1() -> None:
    executor = executor_of(prefer=[[B, A]])
    params = SamplingParams(temperature=1.0, seed=0)
    found = [token_ids[0] for token_ids in ids(executor, (A,), params=params, seeds=tuple(range(600)))]
    # 200 of each are expected; 5 standard deviations are 58, so a false alarm comes once in 500,000 runs.
    assert {token_id: found.count(token_id) for token_id in set(found)} == pytest.approx(
        {A: 200, B: 200, C: 200}, abs=58
    )


def test_prompt_tokens_are_scored_by_the_token_before_them() -> None:
    executor = executor_of()
    score = Score(first_row=1, target_ids=(C, ONE), n_top=2)
    chunk = Chunk(sequence_id=4, token_ids=(A, B, C, ONE), start=0, block_ids=(0,), score=score)
    (scored,) = step(executor, chunk).scored
    assert scored.sequence_id == 4
    assert [len(logprob.top) for logprob in scored.logprobs] == [2, 2]
    again = Chunk(
        sequence_id=5,
        token_ids=(B,),
        start=0,
        block_ids=(1,),
        score=Score(first_row=0, target_ids=(C,), n_top=2),
    )
    assert step(executor, again).scored[0].logprobs == scored.logprobs[:1]


def test_the_script_s_failure_comes_with_its_token_and_not_before() -> None:
    executor = executor_of(raise_at=2)
    assert ids(executor, (A,), (C,)) == [(B,)]
    with pytest.raises(RuntimeError, match="output token 2"):
        draws(executor, (A,), (C, B))


def test_a_stall_ends_when_the_executor_is_closed() -> None:
    executor = executor_of(stall_at=1)
    ended: list[str] = []

    def run() -> None:
        with pytest.raises(RuntimeError, match="stalled at output token 1"):
            draws(executor, (A,), (C,))
        ended.append("raised")

    thread = threading.Thread(target=run)
    thread.start()
    executor.close()
    thread.join(10)
    assert ended == ["raised"]


def test_a_block_that_another_sequence_wrote_is_noticed() -> None:
    executor = executor_of()
    step(executor, Chunk(sequence_id=0, token_ids=(A,) * 4, start=0, block_ids=(0,)))
    with pytest.raises(AssertionError, match="reads positions"):
        step(executor, Chunk(sequence_id=0, token_ids=(A,), start=4, block_ids=(3, 1)))


def test_without_a_source_of_constraints_a_grammar_is_refused() -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a+")
    with pytest.raises(InvalidRequest, match="no grammars"):
        executor_of().prepare(SamplingParams(seed=0, grammar=grammar))
