"""The load generator against a real server that sheds, breaks off, stalls and splits where it likes."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from bakehouse_cluster.bench.connection import ConnectionPool, Reader
from bakehouse_cluster.bench.records import Outcome, Record
from bakehouse_cluster.bench.reply import ReplyReader
from bakehouse_cluster.bench.sending import Sendable, Sender, closed_loop, open_loop
from raw_http import HEAD, LAST_CHUNK, RawServer, Script, chunk, raw_server, refusal, stream
from scripted import until

WAIT_S = 20.0
TWO_TOKENS = (
    '{"choices": [{"text": "a", "finish_reason": null}]}',
    '{"choices": [{"text": "b", "finish_reason": "length"}]}',
    '{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}',
    "[DONE]",
)
ANSWER = stream(*TWO_TOKENS)


def sendable(arrival_s: float | None = None) -> Sendable:
    body = json.dumps({"prompt": "x"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return Sendable(request=head.encode() + body, n_exact=2, n_input=7, arrival_s=arrival_s)


@asynccontextmanager
async def sender_to(*scripts: Script, timeout_s: float = WAIT_S) -> AsyncGenerator[tuple[Sender, RawServer], None]:
    async with raw_server(*scripts) as server:
        pool = ConnectionPool(server.url)
        try:
            yield Sender(pool, timeout_s=timeout_s), server
        finally:
            pool.close()


async def send_one(*script: bytes | asyncio.Event, timeout_s: float = WAIT_S) -> Record:
    async with sender_to(script, timeout_s=timeout_s) as (sender, _):
        return await sender.send(sendable(), time.perf_counter())


async def test_a_whole_answer_is_recorded_with_the_servers_counts() -> None:
    record = await send_one(ANSWER)
    assert record.outcome is Outcome.OK
    assert (record.n_input, record.n_output, len(record.frame_s)) == (7, 2, 2)
    assert record.due_s <= record.sent_s < record.frame_s[0] <= record.frame_s[1] <= record.ended_s


async def test_an_answer_in_single_bytes_is_the_same() -> None:
    record = await send_one(*(ANSWER[index : index + 1] for index in range(len(ANSWER))))
    assert record.outcome is Outcome.OK
    assert (record.n_input, record.n_output, len(record.frame_s)) == (7, 2, 2)


class WatchedPool(ConnectionPool):
    """Shows how much of the last reply has been read."""

    reader: ReplyReader | None = None

    @property
    def n_frames(self) -> int:
        return 0 if self.reader is None else len(self.reader.frame_s)

    async def exchange(self, request: bytes, reader: Reader) -> None:
        assert isinstance(reader, ReplyReader)
        self.reader = reader
        await super().exchange(request, reader)


async def test_times_are_those_at_which_the_frames_came() -> None:
    second = asyncio.Event()
    frames = [chunk(f"data: {event}\n\n".encode()) for event in TWO_TOKENS]
    async with raw_server([HEAD, frames[0], second, *frames[1:], LAST_CHUNK]) as server:
        pool = WatchedPool(server.url)
        sent = asyncio.create_task(Sender(pool, timeout_s=WAIT_S).send(sendable(), time.perf_counter()))
        await until(lambda: pool.n_frames == 1)
        released_s = time.perf_counter()
        second.set()
        record = await sent
        pool.close()
    assert record.frame_s[0] < released_s <= record.frame_s[1]
    assert record.gaps_s == (record.frame_s[1] - record.frame_s[0],)


@pytest.mark.parametrize(("status", "outcome"), [(429, Outcome.SHED), (503, Outcome.SHED), (400, Outcome.ERROR)])
async def test_a_refusal_is_told_in_the_servers_words(status: int, outcome: Outcome) -> None:
    record = await send_one(refusal(status, "no room"))
    assert (record.outcome, record.problem) == (outcome, f"HTTP {status}: no room")
    assert record.n_output == 0


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_stream_that_breaks_off_is_aborted(end: str) -> None:
    frame = chunk(f"data: {TWO_TOKENS[0]}\n\n".encode())
    async with sender_to([HEAD + frame, end]) as (sender, _):  # type: ignore[list-item]
        record = await sender.send(sendable(), time.perf_counter())
    assert record.outcome is Outcome.ABORTED
    assert record.problem is not None
    assert record.problem.startswith("the connection broke")


async def test_no_end_in_time_is_aborted_and_the_next_request_has_another_connection() -> None:
    async with sender_to([HEAD, asyncio.Event()], [ANSWER], timeout_s=0.1) as (sender, server):
        late = await sender.send(sendable(), time.perf_counter())
        assert (late.outcome, late.problem) == (Outcome.ABORTED, "no end within 0.1 s")
        assert (await sender.send(sendable(), time.perf_counter())).outcome is Outcome.OK
        assert server.n_connections == 2


async def test_a_connection_is_kept_between_requests() -> None:
    async with sender_to([ANSWER]) as (sender, server):
        for _ in range(3):
            assert (await sender.send(sendable(), time.perf_counter())).outcome is Outcome.OK
        assert (server.n_connections, len(server.requests)) == (1, 3)


async def test_a_kept_connection_that_the_server_closed_is_replaced_unseen() -> None:
    async with sender_to([ANSWER], ["close"], [ANSWER]) as (sender, server):
        for _ in range(2):
            assert (await sender.send(sendable(), time.perf_counter())).outcome is Outcome.OK
        assert (server.n_connections, len(server.requests)) == (2, 3)


async def test_a_fresh_connection_that_closes_without_an_answer_is_not_asked_again() -> None:
    async with sender_to(["close"]) as (sender, server):
        assert (await sender.send(sendable(), time.perf_counter())).outcome is Outcome.ABORTED
        assert len(server.requests) == 1


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    body = "".join(f"data: {event}\r\n\r\n" for event in TWO_TOKENS).encode()
    async with sender_to([b"HTTP/1.1 200 OK\r\n\r\n" + body, "close"]) as (sender, _):
        assert (await sender.send(sendable(), time.perf_counter())).outcome is Outcome.OK


async def test_an_interim_answer_is_passed_over() -> None:
    assert (await send_one(b"HTTP/1.1 103 Early Hints\r\n\r\n" + ANSWER)).outcome is Outcome.OK


async def test_what_is_no_http_is_aborted() -> None:
    record = await send_one(b"SSH-2.0-OpenSSH_9.2\r\n")
    assert record.outcome is Outcome.ABORTED
    assert record.problem is not None
    assert record.problem.startswith("the server does not speak HTTP/1.1")


async def test_nonsense_in_a_stream_is_told_as_such_and_the_connection_goes_on() -> None:
    nonsense = stream(TWO_TOKENS[0], '{"choices": [null]}', *TWO_TOKENS[1:])
    async with sender_to([nonsense], [ANSWER]) as (sender, server):
        record = await sender.send(sendable(), time.perf_counter())
        assert record.outcome is Outcome.ERROR
        assert record.problem is not None
        assert record.problem.startswith("the server's reply is not OpenAI's: a choice that is no object")
        assert (await sender.send(sendable(), time.perf_counter())).outcome is Outcome.OK
        assert server.n_connections == 1


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_an_error_of_the_reader_is_not_blamed_on_the_server(head: bytes) -> None:
    class Broken:
        def begin(self, status: int) -> None:
            pass

        def receive(self, piece: bytes) -> None:
            pass

        def end(self) -> None:
            raise ZeroDivisionError

    end = LAST_CHUNK if head == HEAD else b""
    async with raw_server([head + end, "close"]) as server:
        pool = ConnectionPool(server.url)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ZeroDivisionError):
                await pool.exchange(sendable().request, Broken())
        pool.close()


async def test_nobody_at_the_address_is_an_error() -> None:
    async with raw_server([ANSWER]) as server:
        url = server.url
    record = await Sender(ConnectionPool(url), timeout_s=WAIT_S).send(sendable(), time.perf_counter())
    assert record.outcome is Outcome.ERROR
    assert record.problem is not None
    assert record.problem.startswith("no connection")


async def test_a_closed_loop_never_has_more_open_than_users_and_reaches_that() -> None:
    all_in = asyncio.Event()
    records: list[Record] = []
    async with sender_to([HEAD, all_in, ANSWER.removeprefix(HEAD)]) as (sender, server):
        running = asyncio.create_task(closed_loop([sendable()] * 10, 3, sender, records.append))
        async with asyncio.timeout(WAIT_S):
            while server.n_open < 3:
                await asyncio.sleep(0.001)
        all_in.set()
        await running
        assert (server.n_open_most, len(server.requests)) == (3, 10)
    assert [record.outcome for record in records] == [Outcome.OK] * 10


async def test_an_open_loop_sends_whatever_is_still_unanswered() -> None:
    all_in = asyncio.Event()
    records: list[Record] = []
    async with sender_to([HEAD, all_in, ANSWER.removeprefix(HEAD)]) as (sender, server):
        arrivals = [0.0, 0.01, 0.01, 0.05]
        running = asyncio.create_task(open_loop([sendable(at) for at in arrivals], sender, records.append))
        async with asyncio.timeout(WAIT_S):
            while server.n_open < 4:
                await asyncio.sleep(0.001)
        assert records == []
        all_in.set()
        await running
    first = min(record.due_s for record in records)
    assert sorted(record.due_s - first for record in records) == pytest.approx(arrivals)
    assert all(record.sent_s >= record.due_s for record in records)
