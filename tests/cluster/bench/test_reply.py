"""What is remembered of a streamed reply, and how it is judged."""

import json
from collections.abc import Iterator
from itertools import count

import pytest
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.bench.reply import ReplyReader, tokens_of_frames


def frame(text: str, finish: str | None = None, usage: dict[str, object] | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage})


def chat_frame(delta: dict[str, object], finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}, separators=(",", ":"))


def usage(n_output: int, n_input: int = 5) -> dict[str, object]:
    return {"prompt_tokens": n_input, "completion_tokens": n_output, "total_tokens": n_input + n_output}


def usage_frame(n_output: int) -> str:
    return json.dumps({"choices": [], "usage": usage(n_output)})


def read(*payloads: str, status: int = 200) -> ReplyReader:
    """Each payload a second after the one before, the first at 1 s."""
    seconds: Iterator[int] = count(1)
    reader = ReplyReader(lambda: float(next(seconds)))
    reader.begin(status)
    for payload in payloads:
        reader.receive(f"data: {payload}\n\n".encode())
    reader.end()
    return reader


def test_each_frame_with_text_leaves_its_time_and_the_servers_counts_are_kept() -> None:
    reader = read(frame("a"), frame("b"), frame("c", "length"), usage_frame(3), "[DONE]")
    assert list(reader.frame_s) == [1, 2, 3]
    assert (reader.n_input, reader.n_usage) == (5, 3)
    assert reader.outcome(3) is Outcome.OK


def test_what_a_chat_sends_before_its_first_text_is_no_token() -> None:
    role = chat_frame({"role": "assistant", "content": ""})
    reader = read(
        role, chat_frame({"content": "a"}), chat_frame({"content": "b"}), chat_frame({}, "stop"), "[DONE]"
    )
    assert list(reader.frame_s) == [2, 3]
    assert reader.outcome(None) is Outcome.OK


def test_reasoning_and_tool_calls_are_text_too() -> None:
    calls = [{"index": 0, "function": {"arguments": "{"}}]
    reader = read(
        chat_frame({"reasoning_content": "hm"}), chat_frame({"tool_calls": calls}, "tool_calls"), "[DONE]"
    )
    assert list(reader.frame_s) == [1, 2]


def test_text_that_reads_like_json_is_text() -> None:
    odd = '"finish_reason":"stop" "usage":{ "error" [DONE]'
    reader = read(frame("a"), frame(odd), frame("[DONE]"), frame("", "length"), "[DONE]")
    assert list(reader.frame_s) == [1, 2, 3]
    assert reader.problem is None


def test_frames_that_come_in_one_piece_have_one_time() -> None:
    reader = ReplyReader(lambda: 4.0)
    reader.begin(200)
    reader.receive(f"data: {frame('a')}\n\ndata: {frame('b')}\n\ndata: {frame('c')}\n\n".encode())
    assert list(reader.frame_s) == [4.0, 4.0, 4.0]


def test_counts_in_each_frame_say_how_many_tokens_it_held() -> None:
    frames = [frame("a", usage=usage(1)), frame("bcd", usage=usage(4)), frame("ef", "length", usage=usage(6))]
    reader = read(*frames, usage_frame(6), "[DONE]")
    assert reader.frame_tokens() == (1, 3, 2)


@pytest.mark.parametrize(
    ("n_frames", "n_output", "counts", "expected"),
    [
        (0, 3, [], ()),
        (3, None, [], (1, 1, 1)),
        (2, 6, [], (3, 3)),
        (2, 6, [(1, 6)], (3, 3)),
        (2, 6, [(0, 2), (1, 6)], (2, 4)),
        (1, 6, [(0, 6)], (6,)),
    ],
)
def test_tokens_are_dealt_out_evenly_where_the_server_does_not_tell(
    n_frames: int, n_output: int | None, counts: list[tuple[int, int]], expected: tuple[float, ...]
) -> None:
    assert tokens_of_frames(n_frames, n_output, counts) == expected


def test_an_answer_of_another_length_is_short_and_says_so() -> None:
    reader = read(frame("a"), frame("b", "stop"), usage_frame(2), "[DONE]")
    assert reader.outcome(3) is Outcome.SHORT
    assert reader.problem == "answered with 2 tokens where 3 were asked for"


def test_any_length_will_do_where_none_was_fixed() -> None:
    assert read(frame("a", "stop"), usage_frame(1), "[DONE]").outcome(None) is Outcome.OK


@pytest.mark.parametrize(
    ("error", "outcome", "problem"),
    [
        (
            {"message": "it broke\nbadly", "code": "internal_error"},
            Outcome.ERROR,
            "error in the stream: it broke badly",
        ),
        ({"message": "too much", "code": "overloaded"}, Outcome.SHED, "error in the stream: too much"),
        ({"message": "too much", "code": 503}, Outcome.SHED, "error in the stream: too much"),
        ("just words", Outcome.ERROR, "error in the stream: just words"),
    ],
)
def test_an_error_inside_a_stream_is_found_after_text(error: object, outcome: Outcome, problem: str) -> None:
    reader = read(frame("a"), json.dumps({"error": error}), "[DONE]")
    assert reader.outcome(1) is outcome
    assert reader.problem == problem


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, Outcome.SHED), (503, Outcome.SHED), (400, Outcome.ERROR), (500, Outcome.ERROR)]
)
def test_a_status_is_told_with_the_servers_words(status: int, outcome: Outcome) -> None:
    reader = ReplyReader(lambda: 0.0)
    reader.begin(status)
    reader.receive(b'{"error": {"mess')
    reader.receive(b'age": "not like this"}}')
    reader.end()
    assert reader.outcome(1) is outcome
    assert reader.problem == f"HTTP {status}: not like this"


def test_an_error_body_that_is_no_json_is_told_as_it_is_and_cut() -> None:
    reader = ReplyReader(lambda: 0.0)
    reader.begin(502)
    reader.receive(b"<html>" + b"x" * 10_000)
    reader.end()
    assert reader.outcome(1) is Outcome.ERROR
    assert reader.problem is not None
    assert reader.problem.startswith("HTTP 502: <html>xxx")
    assert len(reader.problem) == 300


def test_a_stream_without_an_end_is_aborted() -> None:
    reader = read(frame("a"), frame("b"))
    assert reader.outcome(2) is Outcome.ABORTED
    assert reader.problem == "the stream ended without a finish_reason and without [DONE]"


def with_usage(**counts: object) -> str:
    return json.dumps({"choices": [], "usage": counts})


@pytest.mark.parametrize("n_before", [0, 2])
@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        ("{broken", "no JSON object"),
        ("garbage", "no JSON object"),
        ("3", "no JSON object"),
        ("[" * 3_000, "no JSON object"),
        ('{"\\u0061":' * 500, "no JSON object"),
        ('{"choices": "x"}', "choices that is no list"),
        ('{"choices": [null]}', "a choice that is no object"),
        ('{"choices": ["x"]}', "a choice that is no object"),
        ('{"choices": [{"text": 5}]}', "text that is no text"),
        ('{"choices": [{"delta": "x"}]}', "delta that is no object"),
        ('{"choices": [{"delta": {"content": ["x"]}}]}', "content that is no text"),
        ('{"choices": [{"delta": {"tool_calls": 1}}]}', "tool_calls that is no list"),
        ('{"usage": "x"}', "usage that is no object"),
        (with_usage(completion_tokens=-5), "completion_tokens that is no count"),
        (with_usage(completion_tokens=True), "completion_tokens that is no count"),
        (with_usage(completion_tokens=2.5), "completion_tokens that is no count"),
        (with_usage(completion_tokens=int("9" * 400)), "completion_tokens that is no count"),
        (with_usage(prompt_tokens="7"), "prompt_tokens that is no count"),
        (with_usage(prompt_tokens_details=[1]), "prompt_tokens_details that is no object"),
        (with_usage(prompt_tokens_details={"cached_tokens": -1}), "cached_tokens that is no count"),
    ],
)
def test_a_frame_that_is_not_openais_fails_its_request_wherever_it_comes(
    payload: str, complaint: str, n_before: int
) -> None:
    reader = read(*[frame("a")] * n_before, payload, frame("b", "length"), usage_frame(1), "[DONE]")
    assert reader.outcome(1) is Outcome.ERROR
    assert reader.problem is not None
    assert reader.problem.startswith(f"the server's reply is not OpenAI's: {complaint} in ")
    assert payload[:40] in reader.problem
    assert len(reader.problem) < 200
    assert all(n_tokens >= 0 for n_tokens in reader.frame_tokens())


def test_counts_that_fall_from_frame_to_frame_fail_their_request() -> None:
    reader = read(frame("a", usage=usage(4)), frame("b", "length", usage=usage(3)), "[DONE]")
    assert reader.outcome(4) is Outcome.ERROR
    assert reader.problem is not None
    assert "completion_tokens that fall from 4 to 3" in reader.problem


@pytest.mark.parametrize("n_asked", [None, 5])
def test_a_stream_of_nothing_but_its_end_is_no_answer(n_asked: int | None) -> None:
    reader = read("[DONE]")
    assert reader.outcome(n_asked) is Outcome.ERROR
    assert reader.problem == (
        "the server's reply is not OpenAI's: the stream ended without any text or token count"
    )


def test_an_empty_answer_will_do_where_no_length_was_fixed() -> None:
    ended = frame("", "stop")
    assert read(ended, "[DONE]").outcome(None) is Outcome.OK
    assert read(ended, "[DONE]").outcome(5) is Outcome.ERROR
    assert read(ended, usage_frame(0), "[DONE]").outcome(5) is Outcome.SHORT


def test_a_frame_without_text_leaves_no_time_after_the_first_text_either() -> None:
    assert list(read(frame("a"), frame(""), frame("b", "length"), "[DONE]").frame_s) == [1, 3]


def test_half_of_a_surrogate_pair_is_text() -> None:
    reader = read('{"choices": [{"text": "\\ud83d"}]}', frame("b", "length"), "[DONE]")
    assert list(reader.frame_s) == [1, 2]
    assert reader.problem is None


@pytest.mark.parametrize("status", [200, 500])
def test_an_errors_words_can_be_written_to_any_terminal_and_file(status: int) -> None:
    reader = ReplyReader(lambda: 0.0)
    reader.begin(status)
    body = b'{"error": {"message": "it \\ud800 \\u001b[2J broke\\r"}}'
    reader.receive(b"data: " + body + b"\n\n" if status == 200 else body)
    reader.end()
    assert reader.problem is not None
    assert reader.problem.endswith(r": it \ud800 \x1b[2J broke")
    assert reader.problem.encode()


@pytest.mark.parametrize("body", [b"[" * 4096, b'{"error": {"code": 5}}', b"null", b"\xff\xfe"])
def test_an_error_without_a_message_is_told_as_it_is(body: bytes) -> None:
    reader = ReplyReader(lambda: 0.0)
    reader.begin(500)
    reader.receive(body)
    reader.end()
    assert reader.outcome(1) is Outcome.ERROR
    assert reader.problem is not None
    assert reader.problem.startswith(f"HTTP 500: {body[:50].decode(errors='replace')}")
