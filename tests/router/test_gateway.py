"""What reaches the replicas for a call: each accepted field has its effect, defaults come from the model."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from bakehouse_replica.core.errors import (
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    UnknownModel,
)
from bakehouse_replica.core.sampling import Grammar, GrammarKind, SamplingParams
from bakehouse_replica.core.types import FinishReason, ModelSource, Request
from bakehouse_router.admission import WaitingQueue
from bakehouse_router.calls import Call, CompletionCall, GenerationOptions, ToolUse
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import Generation
from bakehouse_router.requests import scoped_salt
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.chat_template import ChatTemplate
from bakehouse_router.text.messages import Tool
from bakehouse_router.text.model_text import ModelText
from gateways import (
    END_ID,
    TEMPLATE,
    VOCABULARY_SIZE,
    ScriptedDispatcher,
    Step,
    chat,
    completion,
    delta,
    ids_of,
    settings,
    status,
    tiny_card,
    tiny_text,
)


async def _drained(generation: Generation) -> None:
    async for _ in generation.pieces():
        pass


async def _pieces(
    text: ModelText, call: Call, dispatcher: ScriptedDispatcher, gateway_settings: GatewaySettings | None = None
) -> list[tuple[int, str, FinishReason | None]]:
    generation = await Gateway(gateway_settings or settings(), dispatcher, text).start(call, "call")
    return [(piece.choice, piece.text, piece.finish) async for arrived in generation.pieces() for piece in arrived]


async def _request(text: ModelText, call: Call) -> Request:
    dispatcher = ScriptedDispatcher()
    await _pieces(text, call, dispatcher)
    (request,) = dispatcher.requests
    return request


SAMPLING_FIELDS = [
    ("n", 3),
    ("max_tokens", 9),
    ("min_tokens", 2),
    ("temperature", 0.25),
    ("top_k", 5),
    ("top_p", 0.5),
    ("min_p", 0.125),
    ("presence_penalty", 1.5),
    ("frequency_penalty", -1.5),
    ("repetition_penalty", 1.25),
    ("seed", -7),
]


@pytest.mark.parametrize(("name", "value"), SAMPLING_FIELDS)
async def test_a_sampling_field_reaches_the_replica_as_it_is(text: ModelText, name: str, value: Any) -> None:
    script: list[Step] = [
        tuple(delta(choice, "", FinishReason.LENGTH) for choice in range(3 if name == "n" else 1))
    ]
    dispatcher = ScriptedDispatcher(script)
    await _pieces(text, completion(**{name: value}), dispatcher)
    assert getattr(dispatcher.requests[0].params, name) == value


@pytest.mark.parametrize(
    ("field", "value", "attribute"),
    [("priority", -3, "priority"), ("tenant", "baker", "tenant")],
)
async def test_a_field_of_the_request_reaches_the_replica(
    text: ModelText, field: str, value: Any, attribute: str
) -> None:
    assert getattr(await _request(text, completion(**{field: value})), attribute) == value


async def test_other_limits_hold_for_calls_that_come_next_and_wrong_ones_change_nothing(text: ModelText) -> None:
    queue = WaitingQueue(max_requests=8, max_tokens=1000)
    gateway = Gateway(settings(max_choices=2), ScriptedDispatcher(), text, admission=queue)

    async def limit_of_choices() -> int:
        with pytest.raises(InvalidRequest, match="it must be at most") as refused:
            await gateway.start(completion(n=100), "call")
        return int(str(refused.value).rpartition(" ")[2])

    assert await limit_of_choices() == 2
    gateway.reconfigure({"max_choices": 3, "max_queued_requests": 1})
    assert await limit_of_choices() == 3
    for wrong in ({"max_choices": 4, "max_tools": 0}, {"max_body": 4}):
        with pytest.raises(ConfigError, match=r"^user_config\.max_(tools: a whole|body: unknown key)"):
            gateway.reconfigure(wrong)
    assert await limit_of_choices() == 3
    queue.enter(1, 1)
    with pytest.raises(Overloaded, match=r"limit of 1$"):
        queue.enter(1, 1)
    gateway.reconfigure({})
    assert await limit_of_choices() == 2
    queue.enter(7, 1)


async def test_what_is_not_given_comes_from_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    defaults = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1, stop_token_ids=(END_ID,)
    )
    text = tiny_text(tmp_path_factory.mktemp("tokenizer"), defaults=defaults)
    params = (await _request(text, completion())).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.9, 0.1)
    assert (params.repetition_penalty, params.stop_token_ids, params.n) == (1.1, (END_ID,), 1)
    assert (await _request(text, completion(top_k=0))).params.top_k is None


async def test_a_top_k_of_the_whole_vocabulary_is_none(text: ModelText) -> None:
    assert (await _request(text, completion(top_k=VOCABULARY_SIZE - 1))).params.top_k == VOCABULARY_SIZE - 1
    assert (await _request(text, completion(top_k=10**30))).params.top_k is None


async def test_stop_ids_join_the_models_own_unless_those_are_ignored(text: ModelText) -> None:
    assert (await _request(text, completion(stop_token_ids=(9, END_ID)))).params.stop_token_ids == (END_ID, 9)
    params = (await _request(text, completion(stop_token_ids=(9,), ignore_eos=True))).params
    assert params.stop_token_ids == (9,)


async def test_without_a_seed_each_request_gets_one_of_its_own(text: ModelText) -> None:
    seeds = {(await _request(text, completion())).params.seed for _ in range(8)}
    assert None not in seeds
    assert len(seeds) == 8


async def test_prompts_are_encoded_once_and_ids_are_taken_as_they_are(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    await _pieces(text, completion(prompts=("hi", "you")), dispatcher)
    await _pieces(text, completion(prompts=((1, 2), (3,))), dispatcher)
    prompts = [request.prompt_ids for request in dispatcher.requests]
    assert prompts == [(0, *ids_of("hi")), (0, *ids_of("you")), (1, 2), (3,)]
    assert (await _request(text, chat())).prompt_ids == (0, 2, *ids_of("user:hi"), 1, 2, *ids_of("assistant:"))


async def test_a_long_prompt_is_encoded_like_a_short_one(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(replicas=(status(tiny_card(max_model_len=100_000)),))
    await _pieces(text, completion(prompts=("ab" * 20_000,)), dispatcher)
    assert dispatcher.requests[0].prompt_ids == (0, *ids_of("ab") * 20_000)


async def test_requests_of_one_call_have_ids_of_their_own(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    await _pieces(text, completion(prompts=("a", "b")), dispatcher)
    assert [request.request_id for request in dispatcher.requests] == ["call-0", "call-1"]


async def test_a_reply_that_would_show_too_much_of_its_prompts_is_refused_before_anything_is_asked(
    text: ModelText,
) -> None:
    dispatcher = ScriptedDispatcher()
    with pytest.raises(InvalidRequest, match=r"echo: the reply would show 3225600 tokens .*; the limit is 500000"):
        await _pieces(text, completion(prompts=((5,) * 150,) * 64, n=16, echoes=True, logprobs=20), dispatcher)
    assert dispatcher.requests == []


async def test_an_unknown_model_is_refused(text: ModelText) -> None:
    call = CompletionCall(model="gpt-4", prompts=("a",), options=GenerationOptions())
    with pytest.raises(UnknownModel) as refused:
        await Gateway(settings(), ScriptedDispatcher(), text).start(call, "call")
    assert refused.value.param == "model"


async def test_the_shortest_context_of_those_that_serve_is_the_limit(text: ModelText) -> None:
    cards = (tiny_card("a", max_model_len=100), tiny_card("b", max_model_len=50), tiny_card("c", max_model_len=10))
    replicas = (status(cards[0]), status(cards[1]), status(cards[2], "dead"))
    dispatcher = ScriptedDispatcher(replicas=replicas)
    await _pieces(text, completion(), dispatcher)
    assert dispatcher.requests[0].params.max_tokens == 47
    with pytest.raises(ContextTooLong, match="context is 50 tokens"):
        await _pieces(text, completion(max_tokens=48), dispatcher)


@pytest.mark.parametrize(
    ("served_name", "source", "shown"),
    [
        (None, "smollm2", "smollm2"),
        (None, "/models/my-model", "my-model"),
        (None, "org/name", "name"),
        ("x", "a/b", "x"),
    ],
)
def test_a_model_is_known_by_its_served_name_or_the_last_part_of_its_source(
    text: ModelText, served_name: str | None, source: str, shown: str
) -> None:
    chosen = GatewaySettings(served_name=served_name, source=ModelSource(model=source))
    gateway = Gateway(chosen, ScriptedDispatcher(), text)
    assert gateway.model_name == shown
    gateway.check_model(shown)
    gateway.check_model(source)


async def test_everything_that_shapes_a_draw_reaches_the_replica(text: ModelText) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="a+")
    call = completion(
        logprobs=3,
        prompt_logprobs=1,
        logit_bias=((7, -100.0), (8, 2.5)),
        allowed_token_ids=(7, 8),
        bad_words=("hi",),
        grammar=grammar,
    )
    params = (await _request(text, call)).params
    assert (params.logprobs, params.prompt_logprobs) == (3, 1)
    assert params.logit_bias == ((7, -100.0), (8, 2.5))
    assert (params.allowed_token_ids, params.grammar) == ((7, 8), grammar)
    assert params.bad_words_ids == (ids_of("hi"), ids_of(" hi"))


async def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(text: ModelText) -> None:
    params = (await _request(text, completion(echoes=True, logprobs=2))).params
    assert (params.logprobs, params.prompt_logprobs) == (2, 2)
    params = (await _request(text, completion(echoes=True, logprobs=2, prompt_logprobs=5))).params
    assert (params.logprobs, params.prompt_logprobs) == (2, 5)


async def test_a_tenant_and_its_salt_are_one_salt_to_the_replica(text: ModelText) -> None:
    assert (await _request(text, completion())).cache_salt == ""
    salted = await _request(text, completion(tenant="a", cache_salt="b"))
    assert salted.cache_salt == scoped_salt("a", "b")


async def test_the_replica_is_told_what_is_left_of_the_time(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    gateway = Gateway(settings(), dispatcher, text)
    now = asyncio.get_running_loop().time()
    generation = await gateway.start(completion(timeout_s=60.0), "call", received_at=now - 20.0)
    await _drained(generation)
    (request,) = dispatcher.requests
    assert request.timeout_s is not None
    assert 30.0 < request.timeout_s <= 40.0


async def test_a_call_whose_time_is_over_is_not_sent(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    gateway = Gateway(settings(), dispatcher, text)
    now = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded, match="20 s"):
        await gateway.start(completion(timeout_s=20.0), "call", received_at=now - 21.0)
    assert dispatcher.requests == []


async def test_c24_the_context_holds_exactly_its_tokens(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(replicas=(status(tiny_card(max_model_len=4096)),))
    await _pieces(text, completion(prompts=((5,) * 4095,), max_tokens=1), dispatcher)
    with pytest.raises(ContextTooLong, match=r"4096 tokens; the prompt has 4095 and max_tokens is 2, 4097"):
        await _pieces(text, completion(prompts=((5,) * 4095,), max_tokens=2), dispatcher)
    with pytest.raises(ContextTooLong, match="4096 tokens"):
        await _pieces(text, completion(prompts=((5,) * 4096,), max_tokens=1), dispatcher)
    await _pieces(text, completion(prompts=((5,) * 4000,)), dispatcher)
    assert [request.params.max_tokens for request in dispatcher.requests] == [1, 96]


async def test_c23_a_length_error_names_limit_prompt_and_what_was_asked_for(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(replicas=(status(tiny_card(max_model_len=2048)),))
    call = completion(prompts=((5,) * 8,), max_tokens=2045, max_tokens_field="max_completion_tokens")
    with pytest.raises(ContextTooLong, match=r"2048 tokens; .* has 8 and .* is 2045, 2053 together") as long:
        await _pieces(text, call, dispatcher)
    assert long.value.param == "max_completion_tokens"


async def test_c25_no_output_tokens_may_be_asked_for_even_where_the_prompt_fills_the_context(
    text: ModelText,
) -> None:
    dispatcher = ScriptedDispatcher(replicas=(status(tiny_card(max_model_len=16)),))
    await _pieces(text, completion(prompts=((5,) * 16,), max_tokens=0), dispatcher)
    assert dispatcher.requests[0].params.max_tokens == 0
    with pytest.raises(ContextTooLong, match="has 17 tokens"):
        await _pieces(text, completion(prompts=((5,) * 17,), max_tokens=0), dispatcher)


class _Refuses:
    async def check(self, grammar: Grammar, param: str, *, parts: Mapping[str, Grammar], tenant: str) -> None:
        raise InvalidRequest(f"{grammar.text} is no grammar", param)


async def test_more_choices_than_a_replica_runs_at_once_are_refused_before_anything_is_made(
    text: ModelText,
) -> None:
    dispatcher = ScriptedDispatcher()
    with pytest.raises(InvalidRequest, match="n is 1000000000; at most 32 sequences") as caught:
        await _pieces(text, completion(n=10**9), dispatcher, settings(max_choices=2**31))
    assert caught.value.param == "n"
    assert not dispatcher.requests


async def test_c11_a_grammar_that_is_none_is_refused_before_anything_is_sent(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    gateway = Gateway(settings(), dispatcher, text, grammars=_Refuses())
    with pytest.raises(InvalidRequest, match="no grammar"):
        await gateway.start(completion(grammar=Grammar(kind=GrammarKind.REGEX, text="(")), "call")
    assert dispatcher.requests == []


async def test_forced_tools_become_a_grammar_and_chosen_ones_do_not(text: ModelText) -> None:
    tools = (Tool(name="bake"),)
    templated = replace(text, chat_template=ChatTemplate(text.tokenizer, TEMPLATE + "{{ tools }}"))
    for choice, is_forced in (("required", True), ("auto", False), ("none", False)):
        tool_use = ToolUse(tools=tools, choice=choice)  # type: ignore[arg-type]
        params = (await _request(templated, chat(tool_use=tool_use))).params
        assert (params.grammar is not None) == is_forced


async def test_an_answer_that_may_call_tools_has_a_parser(text: ModelText) -> None:
    gateway = Gateway(settings(), ScriptedDispatcher(), text)
    tools = (Tool(name="bake"),)
    assert gateway.new_parser(chat()) is None
    assert gateway.new_parser(completion()) is None
    assert gateway.new_parser(chat(tool_use=ToolUse(tools=tools, choice="none"))) is None
    new_parser = gateway.new_parser(chat(tool_use=ToolUse(tools=tools)))
    assert new_parser is not None
    assert new_parser() is not new_parser()


async def test_c35_a_call_is_a_value_that_a_retry_sees_unchanged(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    call = chat("first", "second")
    for _ in range(2):
        await _pieces(text, call, dispatcher)
    first, second = dispatcher.requests
    assert first.prompt_ids == second.prompt_ids == (await _request(text, chat("first", "second"))).prompt_ids


async def test_a_text_is_tokenised_with_or_without_what_the_tokenizer_adds(text: ModelText) -> None:
    gateway = Gateway(settings(), ScriptedDispatcher(), text)
    assert await gateway.tokenize(completion(prompts=("hi",))) == (0, *ids_of("hi"))
    assert await gateway.tokenize(completion(prompts=("hi",)), adds_special_tokens=False) == ids_of("hi")
    assert await gateway.tokenize(chat("hi")) == (await _request(text, chat("hi"))).prompt_ids


async def test_ids_are_detokenised_without_special_tokens(text: ModelText) -> None:
    gateway = Gateway(settings(), ScriptedDispatcher(), text)
    assert await gateway.detokenize((0, *ids_of("ďábel"), END_ID)) == "ďábel"
    with pytest.raises(InvalidRequest, match=f"token id {VOCABULARY_SIZE}"):
        await gateway.detokenize((VOCABULARY_SIZE,))
    with pytest.raises(ContextTooLong, match="600 tokens"):
        await gateway.detokenize((5,) * 600)
