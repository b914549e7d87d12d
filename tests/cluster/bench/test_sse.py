"""Server-sent events, whatever the pieces they arrive in. The oracle is a reader of whole bodies, line by line."""

from itertools import pairwise

import pytest
from bakehouse_cluster.bench.sse import SseReader
from hypothesis import given
from hypothesis import strategies as st

BODIES = {
    "as servers write it": (
        b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n',
        [b'{"a": 1}', b'{"b": 2}', b"[DONE]"],
    ),
    "CR LF": (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
    "CR alone": (b"data: one\r\rdata: two\r\r", [b"one", b"two"]),
    "comments": (b": keep-alive\n\ndata: one\n\n: keep-alive\n: and more\n\ndata: two\n\n", [b"one", b"two"]),
    "a comment inside an event": (b": note\ndata: one\n\n", [b"one"]),
    "other fields": (b"event: message\nid: 7\ndata: one\nretry: 10\n\n", [b"one"]),
    "several data lines": (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
    "no space after the colon": (b"data:one\n\ndata:  two\n\n", [b"one", b" two"]),
    "empty lines between events": (b"\n\n\ndata: one\n\n\n\ndata: two\n\n", [b"one", b"two"]),
    "an event that is cut off": (b"data: one\n\ndata: tw", [b"one"]),
    "a field without a colon": (b"data\n\ndata: one\n\n", [b"", b"one"]),
}


def read(pieces: list[bytes]) -> list[bytes]:
    reader = SseReader()
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


@pytest.mark.parametrize(("body", "events"), BODIES.values(), ids=BODIES.keys())
def test_an_event_is_read_whole_and_byte_by_byte(body: bytes, events: list[bytes]) -> None:
    assert read([body]) == events
    assert read([body[index : index + 1] for index in range(len(body))]) == events


@pytest.mark.parametrize(("body", "events"), BODIES.values(), ids=BODIES.keys())
def test_any_split_in_two_reads_the_same(body: bytes, events: list[bytes]) -> None:
    for cut in range(len(body) + 1):
        assert read([body[:cut], body[cut:]]) == events, f"cut at {cut}"


def by_lines(body: str) -> list[str]:
    """The events of a whole body, after the standard's own steps."""
    events: list[str] = []
    data: list[str] = []
    for line in body.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]:
        if not line:
            if data:
                events.append("\n".join(data))
            data = []
        elif line.partition(":")[0] == "data":
            data.append(line.partition(":")[2].removeprefix(" "))
    return events


@given(
    st.lists(st.sampled_from(["data: a", "data:", "data", ": c", "x: y", "\n", "\r\n", "\r", "é"]), max_size=12),
    st.data(),
)
def test_random_bodies_in_random_pieces_read_as_the_standard_says(parts: list[str], data: st.DataObject) -> None:
    body = "".join(parts)
    encoded = body.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=4)))
    edges = [0, *cuts, len(encoded)]
    pieces = [encoded[begin:end] for begin, end in pairwise(edges)]
    assert [event.decode() for event in read(pieces)] == by_lines(body)


def test_an_event_is_there_as_soon_as_its_last_byte() -> None:
    reader = SseReader()
    assert reader.feed(b"data: one\n") == []
    assert reader.feed(b"\ndata: tw") == [b"one"]
