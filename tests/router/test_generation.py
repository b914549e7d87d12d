"""What a call in flight tells: its pieces with their tokens, its usage, and how it ends."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest
from bakehouse_replica.core.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded, Unavailable
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import (
    Delivery,
    Failure,
    FailureKind,
    FinishReason,
    ReplicaStatus,
    Request,
)
from bakehouse_router.attempts import Attempts
from bakehouse_router.calls import Call
from bakehouse_router.gateway import Gateway
from bakehouse_router.generation import CallUsage, Generation, QueuePlace
from bakehouse_router.prompt_run import TextPiece
from bakehouse_router.text.model_text import ModelText
from gateways import (
    END_ID,
    ScriptedDispatcher,
    Step,
    completion,
    delta,
    ids_of,
    logprob_of,
    settings,
)
from virtual_time import let_pass

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def _started(text: ModelText, call: Call, script: Sequence[Step] = (), **dispatching: int) -> Generation:
    dispatcher = ScriptedDispatcher(script, **dispatching)  # type: ignore[arg-type]
    return await Gateway(settings(), dispatcher, text).start(call, "call")


async def _all(generation: Generation) -> list[TextPiece]:
    return [piece async for arrived in generation.pieces() for piece in arrived]


def _text_of(pieces: Sequence[TextPiece], choice: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.choice == choice)


def _ids(pieces: Sequence[TextPiece], choice: int = 0) -> tuple[int, ...]:
    return tuple(token.token_id for piece in pieces if piece.choice == choice for token in piece.tokens)


class _FailsFor:
    """Passes everything on, but fails for one request."""

    def __init__(self, request_id: str, dispatcher: ScriptedDispatcher) -> None:
        self._request_id = request_id
        self._dispatcher = dispatcher

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return await self._dispatcher.statuses()

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return await self._dispatcher.explain(request_ids)

    async def stream(self, request: Request, attempts: Attempts | None = None) -> AsyncGenerator[Delivery, None]:
        async with aclosing(self._dispatcher.stream(request, attempts)) as deliveries:
            async for delivery in deliveries:
                if request.request_id == self._request_id:
                    raise Unavailable("the replica is gone")
                yield delivery


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(text: ModelText) -> None:
    script: list[Step] = [(delta(0, "x", STOP), delta(1, "y", LENGTH))]
    pieces = await _all(await _started(text, completion(prompts=("a", "b"), n=2), script))
    told = sorted((piece.choice, piece.text, piece.finish) for piece in pieces)
    assert told == [(0, "x", STOP), (1, "y", LENGTH), (2, "x", STOP), (3, "y", LENGTH)]


# --- usage ---------------------------------------------------------------------------------------------------


async def test_c16_usage_adds_up_all_choices_and_counts_the_prompt_once(text: ModelText) -> None:
    script: list[Step] = [(delta(0, "abc", STOP), delta(1, "ab")), (delta(1, "cde", LENGTH),)]
    generation = await _started(text, completion(n=2), script)
    await _all(generation)
    assert generation.usage == CallUsage(prompt_tokens=3, cached_tokens=0, completion_tokens=8)


async def test_c17_the_prompt_counts_in_full_from_the_first_piece_on_and_completions_never_fall(
    text: ModelText,
) -> None:
    call = completion(prompts=((5,) * 400, (6,) * 7), n=2)
    script: list[Step] = [(delta(0, "ab"), delta(1, "x")), (delta(0, "c", STOP),), (delta(1, "yz", STOP),)]
    generation = await _started(text, call, script)
    seen = [generation.usage async for _ in generation.pieces()]
    assert {usage.prompt_tokens for usage in seen} == {407}
    counts = [usage.completion_tokens for usage in seen]
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_c19_cached_tokens_count_once_per_prompt(text: ModelText) -> None:
    script: list[Step] = [tuple(delta(choice, "x", STOP) for choice in range(4))]
    call = completion(n=4, prompts=((1,) * 5, (2,) * 3))
    generation = await _started(text, call, script, cached_tokens=2)
    await _all(generation)
    assert generation.usage == CallUsage(prompt_tokens=8, cached_tokens=4, completion_tokens=8)


async def test_c04_text_tokens_logprobs_and_usage_are_cut_at_the_token_that_completes_the_stop(
    text: ModelText,
) -> None:
    generation = await _started(text, completion(stops=("ND",), logprobs=1), ["aENDbc"])
    pieces = await _all(generation)
    assert (_text_of(pieces), _ids(pieces)) == ("aE", ids_of("aEND"))
    logprobs = [token.logprob for piece in pieces for token in piece.tokens]
    assert logprobs == [logprob_of(token_id, 1) for token_id in ids_of("aEND")]
    assert generation.usage.completion_tokens == 4
    assert pieces[-1].finish is STOP


# --- stops ---------------------------------------------------------------------------------------------------


async def test_c03_held_text_and_its_tokens_come_at_an_end_by_length(text: ModelText) -> None:
    pieces = await _all(await _started(text, completion(stops=("XYZ",), reports_tokens=True), ["ab", "X", "Y"]))
    assert (_text_of(pieces), _ids(pieces), pieces[-1].finish) == ("abXY", ids_of("abXY"), LENGTH)


@pytest.mark.parametrize("min_tokens", [0, 4])
async def test_a_stop_string_does_not_stop_before_min_tokens(text: ModelText, min_tokens: int) -> None:
    script: Sequence[Step] = ["ab", "ab", (delta(0, "", LENGTH),)]
    pieces = await _all(await _started(text, completion(stops=("ab",), min_tokens=min_tokens), script))
    assert _text_of(pieces) == ("ab" if min_tokens else "")
    assert pieces[-1].finish is STOP


@pytest.mark.parametrize("keeps_stop", [False, True])
async def test_the_text_of_a_stop_id_is_left_out_unless_asked_for(text: ModelText, keeps_stop: bool) -> None:
    call = completion(stop_token_ids=ids_of("!"), keeps_stop=keeps_stop, reports_tokens=True)
    pieces = await _all(await _started(text, call, [(delta(0, "ab!", STOP),)]))
    assert _text_of(pieces) == ("ab!" if keeps_stop else "ab")
    assert _ids(pieces) == ids_of("ab!")


@pytest.mark.parametrize("options", [{"stops": ("END",)}, {"stop_token_ids": ids_of("D")}])
async def test_c13_the_token_path_and_the_text_path_end_alike(text: ModelText, options: dict[str, Any]) -> None:
    script: Sequence[Step] = ["ab", "EN", (delta(0, "D", STOP),)]
    plain = await _started(text, completion(**options), script)
    told = await _started(text, completion(reports_tokens=True, **options), script)
    plain_pieces, told_pieces = await _all(plain), await _all(told)
    assert _text_of(plain_pieces) == _text_of(told_pieces)
    assert plain.usage == told.usage
    assert len(_ids(told_pieces)) == told.usage.completion_tokens == 5
    assert _ids(plain_pieces) == ()


async def test_special_tokens_are_reported_without_text(text: ModelText) -> None:
    end = replace(delta(0, "", STOP), token_ids=(END_ID,))
    pieces = await _all(await _started(text, completion(reports_tokens=True), ["a", (end,)]))
    assert (_text_of(pieces), _ids(pieces)) == ("a", (*ids_of("a"), END_ID))


# --- echo ----------------------------------------------------------------------------------------------------


async def test_an_echo_is_the_first_piece_of_each_choice(text: ModelText) -> None:
    script: list[Step] = [(delta(0, "x", STOP), delta(1, "y", STOP))]
    pieces = await _all(await _started(text, completion(prompts=("hi",), echoes=True, n=2), script))
    assert [_text_of(pieces, choice) for choice in range(2)] == ["hix", "hiy"]
    assert next(piece.text for piece in pieces if piece.choice == 1) == "hi"


async def test_c14_offsets_count_from_the_beginning_of_the_echo(text: ModelText) -> None:
    call = completion(prompts=("ab",), echoes=True, logprobs=0)
    pieces = await _all(await _started(text, call, ["c", "d"]))
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.token_id for token in tokens] == [0, *ids_of("abcd")]
    assert [token.text_offset for token in tokens] == [0, 0, 1, 2, 3]
    assert [token.logprob for token in tokens] == [
        None,
        *(logprob_of(token_id, 0) for token_id in ids_of("abcd")),
    ]


async def test_echoed_ids_are_shown_as_text(text: ModelText) -> None:
    call = completion(prompts=((0, *ids_of("ďá")),), echoes=True, reports_tokens=True)
    pieces = await _all(await _started(text, call, ["!"]))
    assert _text_of(pieces) == "ďá!"
    assert [token.text_offset for piece in pieces for token in piece.tokens] == [0, 0, 0, 1, 1, 2]


async def test_c25_an_echo_without_output_is_the_prompt(text: ModelText) -> None:
    generation = await _started(text, completion(prompts=("hi!",), echoes=True, max_tokens=0))
    pieces = await _all(generation)
    assert (_text_of(pieces), pieces[-1].finish) == ("hi!", LENGTH)
    assert generation.usage == CallUsage(prompt_tokens=4, cached_tokens=0, completion_tokens=0)


async def test_prompt_logprobs_are_told_with_the_first_piece_and_as_many_as_were_asked_for(
    text: ModelText,
) -> None:
    call = completion(prompts=((5, 6, 7), (8, 9)), echoes=True, logprobs=3, prompt_logprobs=1)
    generation = await _started(text, call, ["a"])
    pieces = await _all(generation)
    assert generation.prompt_of(0).token_ids == (5, 6, 7)
    assert generation.prompt_of(1).logprobs == (logprob_of(9, 1),)
    echoed = [token.logprob for token in pieces[0].tokens][1:]
    assert echoed == [logprob_of(6, 3), logprob_of(7, 3)]


async def test_prompt_logprobs_that_nobody_asked_for_are_not_told(text: ModelText) -> None:
    generation = await _started(text, completion(echoes=True, logprobs=1), ["a"])
    await _all(generation)
    assert generation.prompt_of(0).logprobs == ()


# --- ends ----------------------------------------------------------------------------------------------------


async def test_one_request_that_fails_cancels_the_others_of_its_call(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["a", asyncio.Event()])
    failing = _FailsFor("call-1", dispatcher)
    generation = await Gateway(settings(), failing, text).start(completion(prompts=("a", "b")), "call")
    with pytest.raises(Unavailable, match="gone"):
        await _all(generation)
    assert dispatcher.n_open == 0


async def test_closing_a_generation_cancels_its_requests(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["a", asyncio.Event()])
    generation = await Gateway(settings(), dispatcher, text).start(completion(prompts=("a", "b")), "call")
    pieces = generation.pieces()
    await anext(pieces)
    assert dispatcher.n_open == 2
    await pieces.aclose()
    assert dispatcher.n_open == 0


@dataclass
class _Watched:
    """Passes everything on, and knows whether the stream was left to end by itself."""

    dispatcher: ScriptedDispatcher
    has_ended_by_itself: bool = False

    async def statuses(self) -> tuple[ReplicaStatus, ...]:
        return await self.dispatcher.statuses()

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        return await self.dispatcher.explain(request_ids)

    async def stream(self, request: Request, attempts: Attempts | None = None) -> AsyncGenerator[Delivery, None]:
        async with aclosing(self.dispatcher.stream(request, attempts)) as deliveries:
            async for delivery in deliveries:
                yield delivery
        await asyncio.sleep(0)
        self.has_ended_by_itself = True


@pytest.mark.parametrize(
    ("script", "is_cancelled"), [(["aEND", "more"], True), (["a", (delta(0, "END", STOP),)], False)]
)
async def test_a_replica_is_told_to_stop_only_where_it_would_go_on(
    text: ModelText, script: list[Step], is_cancelled: bool
) -> None:
    watched = _Watched(ScriptedDispatcher(script))
    generation = await Gateway(settings(), watched, text).start(completion(stops=("END",)), "call")
    pieces = await _all(generation)
    assert (_text_of(pieces), pieces[-1].finish) == ("a", STOP)
    assert watched.has_ended_by_itself != is_cancelled


async def test_c10_a_grammar_that_breaks_is_an_error_of_the_request(text: ModelText) -> None:
    failure = Failure(kind=FailureKind.DRAW, message="the grammar is out of fuel")
    script: list[Step] = ["ab", (delta(0, "", FinishReason.ERROR, failure=failure),)]
    generation = await _started(text, completion(), script)
    pieces = generation.pieces()
    assert (await anext(pieces))[0].text == "ab"
    with pytest.raises(InvalidRequest, match="out of fuel"):
        await anext(pieces)


async def test_a_stream_that_ends_before_its_choices_is_an_error(text: ModelText) -> None:
    script: list[Step] = [(delta(0, "a", STOP),)]
    generation = await _started(text, completion(n=2), script)
    with pytest.raises(EngineDead, match="ended before its choices did"):
        await _all(generation)


async def test_a_replica_that_hangs_does_not_outlast_the_deadline(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["a", asyncio.Event()])
    generation = await Gateway(settings(), dispatcher, text).start(completion(timeout_s=30.0), "call")
    pieces = generation.pieces()
    await anext(pieces)
    let_pass(30.0)
    with pytest.raises(DeadlineExceeded, match="30 s"):
        await anext(pieces)
    assert dispatcher.n_open == 0


async def test_a_deadline_that_is_met_changes_nothing(text: ModelText) -> None:
    plain = await _all(await _started(text, completion(), ["a", "b"]))
    assert await _all(await _started(text, completion(timeout_s=60.0), ["a", "b"])) == plain


# --- the queue -----------------------------------------------------------------------------------------------


class _Queue:
    """Counts who waits; has room for one call."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, int]] = []
        self.n_waiting = 0

    def enter(self, n_requests: int, n_tokens: int) -> QueuePlace:
        if self.n_waiting:
            raise Overloaded("the queue is full", 3.0)
        self.entered.append((n_requests, n_tokens))
        self.n_waiting += 1
        return _Place(self)

    def limit(self, *, max_requests: int, max_tokens: int) -> None:
        raise NotImplementedError("this room is for one call")


class _Place:
    def __init__(self, queue: _Queue) -> None:
        self._queue: _Queue | None = queue

    def leave(self) -> None:
        if self._queue is not None:
            self._queue.n_waiting -= 1
            self._queue = None


async def test_a_call_waits_in_the_queue_until_each_of_its_prompts_has_begun(text: ModelText) -> None:
    queue, more = _Queue(), asyncio.Event()
    dispatcher = ScriptedDispatcher([more, "a", asyncio.Event()])
    gateway = Gateway(settings(keep_alive_s=0.01), dispatcher, text, admission=queue)
    pieces = (await gateway.start(completion(prompts=((1, 2), (3,))), "call")).pieces()
    assert await anext(pieces) == ()
    assert (queue.entered, queue.n_waiting) == ([(2, 3)], 1)
    with pytest.raises(Overloaded):
        await anext((await gateway.start(completion(), "other")).pieces())
    more.set()
    for _ in range(2):
        await anext(pieces)
    assert queue.n_waiting == 0
    await pieces.aclose()


async def test_a_call_that_is_closed_while_it_waits_leaves_the_queue(text: ModelText) -> None:
    queue = _Queue()
    dispatcher = ScriptedDispatcher([asyncio.Event()])
    gateway = Gateway(settings(keep_alive_s=0.01), dispatcher, text, admission=queue)
    pieces = (await gateway.start(completion(), "call")).pieces()
    await anext(pieces)
    await pieces.aclose()
    assert queue.n_waiting == 0


async def test_a_call_that_is_never_run_never_enters_the_queue(text: ModelText) -> None:
    queue = _Queue()
    await Gateway(settings(), ScriptedDispatcher(), text, admission=queue).start(completion(), "call")
    assert queue.entered == []
