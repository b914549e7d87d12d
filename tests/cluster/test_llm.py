"""`bakehouse.LLM` with the real default model."""

import asyncio
from collections.abc import Iterator

import pytest
from bakehouse import LLM, SamplingParams
from bakehouse_replica.core.errors import ConfigError, InvalidRequest, StartupError
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.core.types import FinishReason

pytestmark = pytest.mark.e2e

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=1024, kv_memory="64MiB") as loaded:
        yield loaded


def test_a_prompt_is_continued_sensibly(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY)
    assert "Paris" in output.text
    assert output.usage.prompt_tokens == len(output.prompt_ids)
    assert output.usage.completion_tokens == len(output.token_ids) <= 12


def test_in_bfloat16_a_prompt_is_continued_sensibly() -> None:
    with LLM(max_model_len=256, kv_memory="32MiB", dtype="bfloat16") as llm:
        (output,) = llm.generate(PROMPT, GREEDY)
    assert "Paris" in output.text


def test_outputs_stand_in_the_order_of_the_prompts_and_do_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = [PROMPT, "Once upon a time", "1, 2, 3, 4,"]
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]
    assert [output.text for output in llm.generate(prompts, GREEDY)] == alone


def test_token_ids_are_as_good_as_text(llm: LLM) -> None:
    (by_text,) = llm.generate(PROMPT, GREEDY)
    (by_ids,) = llm.generate(by_text.prompt_ids, GREEDY)
    (by_list,) = llm.generate([list(by_text.prompt_ids)], GREEDY)
    assert by_text.token_ids == by_ids.token_ids == by_list.token_ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, GREEDY)
    stop = whole.text[6:9]
    (stopped,) = llm.generate(PROMPT, GREEDY, stop=stop)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.usage.completion_tokens == len(stopped.token_ids) <= len(whole.token_ids)
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert stopped.usage.prompt_tokens == whole.usage.prompt_tokens


def test_several_choices_of_one_seed_come_out_alike_twice(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=8)
    first, second = (llm.generate(PROMPT, params)[0] for _ in range(2))
    assert len(first.choices) == 3
    assert [choice.token_ids for choice in first.choices] == [choice.token_ids for choice in second.choices]
    assert len({choice.token_ids for choice in first.choices}) > 1


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


async def test_it_works_where_an_event_loop_runs_already(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert "Paris" in llm.generate(PROMPT, GREEDY)[0].text


@pytest.mark.parametrize(
    ("prompt", "params", "stop", "complaint"),
    [
        ([[]], GREEDY, None, "prompt is empty"),
        ([[10**9]], GREEDY, None, "token id 1000000000"),
        ([[5] * 2000], GREEDY, None, "the prompt has 2000 tokens"),
        (PROMPT, SamplingParams(max_tokens=5000), None, "max_tokens is 5000"),
        (PROMPT, GREEDY, ["x", ""], "empty string"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    llm: LLM, prompt: str | list[list[int]], params: SamplingParams, stop: list[str] | None, complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        llm.generate(prompt, params, stop=stop)


def test_an_unknown_option_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^model\.dtype: "):
        LLM(dtype="float8")


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(StartupError, match=r"KiB|MiB"):
        LLM(kv_memory="1KiB")


def test_a_longer_context_than_the_models_is_refused() -> None:
    with pytest.raises(StartupError, match=r"context length, 8192"):
        LLM(max_model_len=10_000_000)


def test_a_conversation_is_answered(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (alone,) = llm.chat(question, GREEDY)
    assert "Paris" in alone.text
    assert [output.text for output in llm.chat([question, question], GREEDY)] == [alone.text] * 2


def test_a_wrong_message_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.chat([{"role": "baker", "content": "hi"}], GREEDY)
    assert refused.value.param == "messages[0].role"


def test_logprobs_come_with_each_token_and_each_prompt_token_but_the_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate(PROMPT, params)
    (choice,) = output.choices
    assert len(choice.logprobs) == len(choice.token_ids) == 4
    assert all(logprob.rank == 1 and len(logprob.top) == 2 for logprob in choice.logprobs)
    assert len(output.prompt_logprobs) == len(output.prompt_ids) - 1


def test_a_grammar_is_followed(llm: LLM) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text=r"\d{4}")
    (output,) = llm.generate("The year is", SamplingParams(temperature=0.0, grammar=grammar))
    assert len(output.text) == 4
    assert output.text.isdigit()
    assert output.finish_reason is FinishReason.STOP


def test_words_that_are_banned_by_their_ids_are_not_put_out(llm: LLM) -> None:
    (free,) = llm.generate(PROMPT, GREEDY)
    banned = SamplingParams(temperature=0.0, max_tokens=12, bad_words_ids=(free.token_ids[:2],))
    (output,) = llm.generate(PROMPT, banned)
    assert output.token_ids[:2] != free.token_ids[:2]
