"""What reaches the replicas for a call: each accepted field has its effect, defaults come from the model."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from bakehouse_replica.core.errors import ContextTooLong, InvalidRequest, Unavailable, UnknownModel
from bakehouse_replica.core.types import (
    Delivery,
    FinishReason,
    ModelSource,
    ReplicaStatus,
    Request,
    SamplingParams,
)
from bakehouse_router.api.bodies import chat_call, completion_call
from bakehouse_router.api.schema import ChatBody, CompletionBody, parse_body
from bakehouse_router.calls import Call, CompletionCall, GenerationOptions
from bakehouse_router.gateway import Gateway
from bakehouse_router.settings import GatewaySettings
from bakehouse_router.text.model_text import ModelText
from gateways import (
    END_ID,
    MODEL,
    VOCABULARY_SIZE,
    ScriptedDispatcher,
    Step,
    delta,
    ids_of,
    settings,
    status,
    tiny_card,
    tiny_text,
)


def _completion(**fields: object) -> CompletionCall:
    return completion_call(parse_body(CompletionBody, {"model": MODEL, "prompt": [5, 6, 7], **fields}))


def _chat(**fields: object) -> Call:
    messages = [{"role": "user", "content": "hi"}]
    return chat_call(parse_body(ChatBody, {"model": MODEL, "messages": messages, **fields}))


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


class _FailsFor:
    """Passes everything on, but fails for one request."""

    def __init__(self, request_id: str, dispatcher: ScriptedDispatcher) -> None:
        self._request_id = request_id
        self._dispatcher = dispatcher

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return await self._dispatcher.statuses()

    async def stream(self, request: Request) -> AsyncGenerator[Delivery, None]:
        async with aclosing(self._dispatcher.stream(request)) as deliveries:
            async for delivery in deliveries:
                if request.request_id == self._request_id:
                    raise Unavailable("the replica is gone")
                yield delivery


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
async def test_a_sampling_field_reaches_the_replica_as_it_is(text: ModelText, name: str, value: float) -> None:
    script: list[Step] = [
        tuple(delta(choice, "", FinishReason.LENGTH) for choice in range(3 if name == "n" else 1))
    ]
    dispatcher = ScriptedDispatcher(script)
    await _pieces(text, _completion(**{name: value}), dispatcher)
    assert getattr(dispatcher.requests[0].params, name) == value


async def test_integers_are_numbers_too(text: ModelText) -> None:
    assert (await _request(text, _completion(temperature=1))).params.temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value", "attribute"),
    [("priority", -3, "priority"), ("cache_salt", "salt", "cache_salt")],
)
async def test_a_field_of_the_request_reaches_the_replica(
    text: ModelText, field: str, value: object, attribute: str
) -> None:
    assert getattr(await _request(text, _completion(**{field: value})), attribute) == value


async def test_the_log_says_whose_request_it_is(text: ModelText, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bakehouse_router.gateway")
    request = await _request(text, _completion(user="bob"))
    assert f"request {request.request_id} is of user 'bob'" in caplog.text


async def test_max_completion_tokens_is_max_tokens(text: ModelText) -> None:
    assert (await _request(text, _chat(max_completion_tokens=9))).params.max_tokens == 9
    assert (await _request(text, _chat(max_completion_tokens=9, max_tokens=9))).params.max_tokens == 9


async def test_what_is_not_given_or_null_comes_from_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    defaults = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1, stop_token_ids=(END_ID,)
    )
    text = tiny_text(tmp_path_factory.mktemp("tokenizer"), defaults=defaults)
    nulls = {
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "stop": None,
        "n": None,
        "seed": None,
        "stream": None,
    }
    for call in (_completion(), _completion(**nulls)):
        params = (await _request(text, call)).params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.9, 0.1)
        assert (params.repetition_penalty, params.stop_token_ids, params.n) == (1.1, (END_ID,), 1)
    assert (await _request(text, _completion(top_k=0))).params.top_k is None


async def test_a_top_k_of_the_whole_vocabulary_is_none(text: ModelText) -> None:
    assert (await _request(text, _completion(top_k=VOCABULARY_SIZE - 1))).params.top_k == VOCABULARY_SIZE - 1
    assert (await _request(text, _completion(top_k=10**30))).params.top_k is None


async def test_stop_ids_join_the_models_own_unless_those_are_ignored(text: ModelText) -> None:
    assert (await _request(text, _completion(stop_token_ids=[9, END_ID]))).params.stop_token_ids == (END_ID, 9)
    params = (await _request(text, _completion(stop_token_ids=[9], ignore_eos=True))).params
    assert params.stop_token_ids == (9,)


async def test_without_a_seed_each_request_gets_one_of_its_own(text: ModelText) -> None:
    seeds = {(await _request(text, _completion())).params.seed for _ in range(8)}
    assert None not in seeds
    assert len(seeds) == 8


async def test_prompts_are_encoded_once_and_ids_are_taken_as_they_are(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    await _pieces(text, _completion(prompt=["hi", "you"]), dispatcher)
    await _pieces(text, _completion(prompt=[[1, 2], [3]]), dispatcher)
    prompts = [request.prompt_ids for request in dispatcher.requests]
    assert prompts == [(0, *ids_of("hi")), (0, *ids_of("you")), (1, 2), (3,)]
    assert (await _request(text, _chat())).prompt_ids == (0, 2, *ids_of("user:hi"), 1, 2, *ids_of("assistant:"))


async def test_a_long_prompt_is_encoded_like_a_short_one(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(replicas=(status(tiny_card(max_model_len=100_000)),))
    await _pieces(text, _completion(prompt="ab" * 20_000), dispatcher)
    assert dispatcher.requests[0].prompt_ids == (0, *ids_of("ab") * 20_000)


async def test_requests_of_one_call_have_ids_of_their_own(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher()
    await _pieces(text, _completion(prompt=["a", "b"]), dispatcher)
    assert [request.request_id for request in dispatcher.requests] == ["call-0", "call-1"]


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(text: ModelText) -> None:
    script: list[Step] = [(delta(0, "x", FinishReason.STOP), delta(1, "y", FinishReason.LENGTH))]
    pieces = await _pieces(text, _completion(prompt=["a", "b"], n=2), ScriptedDispatcher(script))
    assert sorted(pieces) == [
        (0, "x", FinishReason.STOP),
        (1, "y", FinishReason.LENGTH),
        (2, "x", FinishReason.STOP),
        (3, "y", FinishReason.LENGTH),
    ]


async def test_c19_cached_tokens_count_once_per_prompt(text: ModelText) -> None:
    script: list[Step] = [tuple(delta(choice, "x", FinishReason.STOP) for choice in range(4))]
    dispatcher = ScriptedDispatcher(script, cached_tokens=2)
    generation = await Gateway(settings(), dispatcher, text).start(
        _completion(n=4, prompt=[[1] * 5, [2] * 3]), "call"
    )
    async for _ in generation.pieces():
        pass
    assert generation.usage.cached_tokens == 4
    assert generation.usage.prompt_tokens == 8
    assert generation.usage.completion_tokens == 8


@pytest.mark.parametrize("min_tokens", [0, 4])
async def test_a_stop_string_does_not_stop_before_min_tokens(text: ModelText, min_tokens: int) -> None:
    script: Sequence[Step] = ["ab", "ab", (delta(0, "", FinishReason.LENGTH),)]
    pieces = await _pieces(text, _completion(stop="ab", min_tokens=min_tokens), ScriptedDispatcher(script))
    assert "".join(piece[1] for piece in pieces) == ("ab" if min_tokens else "")
    assert pieces[-1][2] is FinishReason.STOP


async def test_one_request_that_fails_cancels_the_others_of_its_call(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["a", asyncio.Event()])
    failing = _FailsFor("call-1", dispatcher)
    generation = await Gateway(settings(), failing, text).start(_completion(prompt=["a", "b"]), "call")
    with pytest.raises(Unavailable, match="gone"):
        async for _ in generation.pieces():
            pass
    assert dispatcher.n_open == 0


async def test_closing_a_generation_cancels_its_requests(text: ModelText) -> None:
    never = asyncio.Event()
    dispatcher = ScriptedDispatcher(["a", never])
    generation = await Gateway(settings(), dispatcher, text).start(_completion(prompt=["a", "b"]), "call")
    pieces = generation.pieces()
    await anext(pieces)
    assert dispatcher.n_open == 2
    await pieces.aclose()
    assert dispatcher.n_open == 0


async def test_an_unknown_model_is_refused(text: ModelText) -> None:
    call = CompletionCall(model="gpt-4", prompts=("a",), options=GenerationOptions())
    with pytest.raises(UnknownModel) as refused:
        await Gateway(settings(), ScriptedDispatcher(), text).start(call, "call")
    assert refused.value.param == "model"


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


async def test_the_shortest_context_of_those_that_serve_is_the_limit(text: ModelText) -> None:
    cards = (tiny_card("a", max_model_len=100), tiny_card("b", max_model_len=50), tiny_card("c", max_model_len=10))
    replicas = (status(cards[0]), status(cards[1]), status(cards[2], "dead"))
    dispatcher = ScriptedDispatcher(replicas=replicas)
    await _pieces(text, _completion(), dispatcher)
    assert dispatcher.requests[0].params.max_tokens == 47
    with pytest.raises(ContextTooLong, match="context is 50 tokens"):
        await _pieces(text, _completion(max_tokens=48), dispatcher)


async def test_more_choices_than_the_settings_allow_are_refused(text: ModelText) -> None:
    with pytest.raises(InvalidRequest, match="at most 2"):
        await _pieces(text, _completion(n=3), ScriptedDispatcher(), settings(max_choices=2))
