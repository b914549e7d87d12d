"""`/v1/responses` over HTTP: the response, its events, how they end, and what an answer may consist of."""

import asyncio
from typing import cast

import pytest
from bakehouse_replica.core.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded, Unavailable
from bakehouse_replica.core.types import FinishReason
from bakehouse_router.api.generating import REPLICA_HEADER
from bakehouse_router.text.model_text import ModelText
from gateways import END, MODEL, ScriptedDispatcher, Step, ids_of
from openai.types.responses import (
    ResponseErrorEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseStreamEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from responses import (
    RESPONSES,
    ask_streamed,
    ask_whole,
    asking,
    cut,
    final,
    http_to,
    kinds,
    read_events,
    without_names,
)
from virtual_time import let_pass

MESSAGE_KINDS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.delta"]
MESSAGE_END_KINDS = ["output_text.done", "content_part.done", "output_item.done"]


def _text_part(message: object) -> ResponseOutputText:
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert isinstance(part, ResponseOutputText)
    return part


async def test_an_answer_is_one_message_of_one_text(text: ModelText) -> None:
    response = await ask_whole(text, cut("Hello, wörld", 3))
    assert (response.object, response.model, response.status) == ("response", MODEL, "completed")
    assert response.id.startswith("resp_")
    assert response.output_text == "Hello, wörld"
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "completed")
    assert (_text_part(message).annotations, _text_part(message).logprobs) == ([], [])
    assert (response.error, response.incomplete_details, response.instructions) == (None, None, None)
    assert response.completed_at is not None


async def test_an_answer_that_is_too_long_is_incomplete_and_so_is_its_last_item(text: ModelText) -> None:
    response = await ask_whole(text, ["Hello"], max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.output_text, response.output[0].status) == ("Hello", "incomplete")  # type: ignore[union-attr]
    assert response.completed_at is None
    assert response.max_output_tokens == 5
    events = await ask_streamed(text, ["Hello"], max_output_tokens=5)
    assert events[-1].type == "response.incomplete"
    assert without_names(final(events)) == without_names(response)


async def test_an_answer_without_any_text_is_a_message_of_no_text(text: ModelText) -> None:
    response = await ask_whole(text, cut("", 1))
    assert (len(response.output), response.output_text, response.status) == (1, "", "completed")
    assert kinds(await ask_streamed(text, cut("", 1))) == [
        "created",
        "in_progress",
        *MESSAGE_KINDS[:2],
        *MESSAGE_END_KINDS,
        "completed",
    ]


async def test_a_stream_tells_each_item_from_its_beginning_to_its_end(text: ModelText) -> None:
    events = await ask_streamed(text, cut("Hi you", 3))
    assert kinds(events) == ["created", "in_progress", *MESSAGE_KINDS, *MESSAGE_END_KINDS, "completed"]
    deltas = [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]
    assert deltas == ["Hi ", "you"]
    (message,) = final(events).output
    named = {getattr(event, "item_id", message.id) for event in events}
    assert named == {message.id}
    assert events[0].response.status == events[1].response.status == "in_progress"  # type: ignore[union-attr]
    assert events[0].response.output == []  # type: ignore[union-attr]
    assert events[0].response.id == final(events).id  # type: ignore[union-attr]


async def test_a_stream_has_no_marker_after_its_last_event(text: ModelText) -> None:
    async with http_to(text, ScriptedDispatcher(["Hi"])) as http:
        reply = await http.post(RESPONSES, json=asking(stream=True))
    assert "[DONE]" not in reply.text
    assert reply.text.startswith("event: response.created\ndata: {")
    assert reply.text.split("\n\n")[-2].startswith("event: response.incomplete\n")
    assert reply.headers[REPLICA_HEADER] == "replica-1"


async def test_tokens_are_counted_as_the_prompt_and_the_answer_have_them(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(cut("Hello", 2), cached_tokens=16)
    async with http_to(text, dispatcher) as http:
        whole = (await http.post(RESPONSES, json=asking())).json()
        events = read_events((await http.post(RESPONSES, json=asking(stream=True))).text)
    n_prompt = len(dispatcher.requests[0].prompt_ids)
    assert whole["usage"] == {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt + 5,
    }
    assert final(events).usage is not None
    assert final(events).usage.model_dump(exclude_unset=True) == whole["usage"]  # type: ignore[union-attr]
    assert events[0].response.usage is None  # type: ignore[union-attr]


async def test_log_probabilities_are_shown_with_the_text_of_their_tokens(text: ModelText) -> None:
    asked: dict[str, object] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await ask_whole(text, cut("abc", 1), **asked)
    assert response.top_logprobs == 2
    logprobs = _text_part(response.output[0]).logprobs
    assert logprobs is not None
    assert [(one.token, one.logprob) for one in logprobs] == [
        (letter, -float(ids_of(letter)[0])) for letter in "abc"
    ]
    assert [len(one.top_logprobs) for one in logprobs] == [2, 2, 2]
    events = await ask_streamed(text, cut("abc", 1), **asked)
    deltas = [event for event in events if isinstance(event, ResponseTextDeltaEvent)]
    assert [[one.token for one in event.logprobs] for event in deltas] == [["a"], ["b"], ["c"]]
    (done,) = [event for event in events if isinstance(event, ResponseTextDoneEvent)]
    assert [one.token for one in done.logprobs] == ["a", "b", "c"]


async def test_the_token_that_ends_an_answer_has_its_log_probability_too(text: ModelText) -> None:
    asked: dict[str, object] = {"include": ["message.output_text.logprobs"], "stop": "cd"}
    response = await ask_whole(text, ["ab", "c", "d"], **asked)
    logprobs = _text_part(response.output[0]).logprobs
    assert logprobs is not None
    assert response.output_text == "ab"
    assert response.usage is not None
    assert len(logprobs) == response.usage.output_tokens == 4
    events = await ask_streamed(text, ["ab", "c", "d"], **asked)
    told = [one for event in events if isinstance(event, ResponseTextDeltaEvent) for one in event.logprobs]
    assert [one.token for one in told] == ["a", "b", "c", "d"]


async def test_a_stop_string_completes_an_answer_and_cancels_the_request(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["Hi E", "ND", asyncio.Event()])
    async with http_to(text, dispatcher) as http:
        response = (await http.post(RESPONSES, json=asking(stop="END"))).json()
        await asyncio.wait_for(dispatcher.closed.wait(), 60)
    assert (response["status"], response["output"][0]["content"][0]["text"]) == ("completed", "Hi ")
    assert dispatcher.n_open == 0


async def test_what_was_asked_for_is_repeated_with_what_the_model_chose(text: ModelText) -> None:
    plain = await ask_whole(text, ["Hi"])
    assert (plain.temperature, plain.top_p, plain.metadata, plain.tool_choice) == (0.0, 1.0, {}, "auto")
    assert (plain.tools, plain.parallel_tool_calls, plain.truncation) == ([], True, "disabled")
    assert plain.text is not None
    assert plain.text.format is not None
    assert plain.text.format.type == "text"
    asked = await ask_whole(
        text,
        ["Hi"],
        temperature=0.5,
        top_p=0.25,
        metadata={"topic": "bread"},
        instructions="Be brief.",
        user="u",
        parallel_tool_calls=False,
    )
    assert (asked.temperature, asked.top_p, asked.metadata) == (0.5, 0.25, {"topic": "bread"})
    assert (asked.instructions, asked.user, asked.parallel_tool_calls) == ("Be brief.", "u", False)


async def test_the_conversation_reaches_the_model_in_its_order(text: ModelText) -> None:
    items = [
        {"role": "user", "content": "one"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "t", "annotations": [], "logprobs": [{"token": "t"}]},
                {"type": "output_text", "text": "wo"},
            ],
        },
        {"role": "user", "content": [{"type": "input_text", "text": f"three{END}"}]},
    ]
    dispatcher = ScriptedDispatcher(["Hi"])
    async with http_to(text, dispatcher) as http:
        await http.post(RESPONSES, json=asking(input=items, instructions="Be brief."))
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
        turns += [{"role": "assistant", "content": "two"}, {"role": "user", "content": f"three{END}"}]
        await http.post("/v1/chat/completions", json={"model": MODEL, "messages": turns})
    assert dispatcher.requests[0].prompt_ids == dispatcher.requests[1].prompt_ids


ERRORS = [
    (InvalidRequest("it broke"), 400, "invalid_request", "invalid_prompt"),
    (Overloaded("the queue is full", 2.5), 429, "overloaded", "rate_limit_exceeded"),
    (Unavailable("nobody serves"), 503, "unavailable", "server_error"),
    (EngineDead("the engine has failed"), 503, "engine_dead", "server_error"),
    (DeadlineExceeded("too late"), 408, "deadline_exceeded", "server_error"),
    (ZeroDivisionError("secret internals"), 500, "internal_error", "server_error"),
]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("error", "status", "code", "late_code"), ERRORS, ids=lambda value: str(value))
async def test_an_error_before_the_first_token_is_a_status(
    text: ModelText, error: Exception, status: int, code: str, late_code: str, is_streamed: bool
) -> None:
    async with http_to(text, ScriptedDispatcher([error])) as http:
        reply = await http.post(RESPONSES, json=asking(stream=is_streamed))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert "secret" not in reply.text


@pytest.mark.parametrize(("error", "status", "code", "late_code"), ERRORS, ids=lambda value: str(value))
async def test_c10_an_error_after_it_is_one_event_and_a_failed_response(
    text: ModelText, error: Exception, status: int, code: str, late_code: str
) -> None:
    script: list[Step] = ["a", "b", error]
    events = await ask_streamed(text, script)
    assert kinds(events) == ["created", "in_progress", *MESSAGE_KINDS, "error", "failed"]
    assert isinstance(events[-2], ResponseErrorEvent)
    assert events[-2].code == code
    failed = final(events)
    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == (late_code, events[-2].message)
    assert (failed.output_text, failed.output[0].status) == ("ab", "incomplete")  # type: ignore[union-attr]
    assert failed.usage is None
    assert "secret" not in failed.to_json()
    async with http_to(text, ScriptedDispatcher(script)) as http:
        assert (await http.post(RESPONSES, json=asking())).status_code == status


async def test_a_deadline_that_passes_while_it_streams_fails_the_response(text: ModelText) -> None:
    lines: list[str] = []
    async with (
        http_to(text, ScriptedDispatcher(["a", asyncio.Event()])) as http,
        http.stream("POST", RESPONSES, json=asking(stream=True, timeout_s=20)) as reply,
    ):
        async for line in reply.aiter_lines():
            lines.append(line)
            if "output_text.delta" in line and line.startswith("data"):
                let_pass(20)
    events = read_events("\n".join(lines) + "\n")
    assert kinds(events)[-2:] == ["error", "failed"]
    assert cast("ResponseErrorEvent", events[-2]).code == "deadline_exceeded"
    async with http_to(text, ScriptedDispatcher([asyncio.Event()])) as http:
        assert (await http.post(RESPONSES, json=asking(stream=True, timeout_s=0.05))).status_code == 408


async def test_a_waiting_stream_opens_the_response_and_sends_comments(text: ModelText) -> None:
    first = asyncio.Event()
    lines: list[str] = []
    async with (
        http_to(text, ScriptedDispatcher([first, "a"]), keep_alive_s=0.02) as http,
        http.stream("POST", RESPONSES, json=asking(stream=True)) as reply,
    ):
        async for line in reply.aiter_lines():
            lines.append(line)
            if lines.count(": keep-alive") == 2:
                first.set()
    content = "\n".join(lines) + "\n"
    assert content.index("event: response.in_progress") < content.index(": keep-alive")
    assert final(read_events(content)).output_text == "a"


async def test_a_client_that_goes_cancels_the_request(text: ModelText) -> None:
    dispatcher = ScriptedDispatcher(["a", asyncio.Event()])
    async with http_to(text, dispatcher) as http:
        async with http.stream("POST", RESPONSES, json=asking(stream=True)) as reply:
            async for line in reply.aiter_lines():
                if "output_text.delta" in line:
                    break
        await asyncio.wait_for(dispatcher.closed.wait(), 60)
    assert dispatcher.n_open == 0


async def test_half_a_character_waits_for_its_other_half(text: ModelText) -> None:
    events: list[ResponseStreamEvent] = await ask_streamed(text, cut("ďábel", 1, FinishReason.LENGTH))
    assert "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)) == "ďábel"
