"""CPU time that the load generator takes for a frame, beside that of aiohttp's client.

A server process sends the same frame to each of 64 streams every 8 ms. Printed is the client's own CPU time.

    .venv/bin/python cluster/benchmarks/generator.py [--streams 64] [--frames 250] [--rounds 3]
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Coroutine

import aiohttp
import uvloop
from bakehouse_cluster.bench.connection import ConnectionPool
from bakehouse_cluster.bench.foreign import parsed
from bakehouse_cluster.bench.reply import ReplyReader
from bakehouse_cluster.bench.sending import Sendable, Sender, closed_loop

TICK_S = 0.008
N_REPEATS = 100_000
FRAME = (
    b'data: {"id":"cmpl-1234567890abcdef1234567890abcdef","object":"text_completion","created":1764494000,'
    b'"model":"smollm2","choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}],"usage":null}'
    b"\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "x"}'
PATH = "/v1/completions"
REQUEST = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (PATH.encode(), len(BODY), BODY)


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Streams(asyncio.Protocol):
    """One connection of the server: `left` frames are still to be sent to it."""

    def __init__(self, n_frames: int, running: "set[Streams]") -> None:
        self._n_frames = n_frames
        self._running = running
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.left = self._n_frames
        self.transport.write(HEAD)  # type: ignore[attr-defined]
        self._running.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._running.discard(self)

    def tick(self) -> None:
        self.left -= 1
        end = b"" if self.left else chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.transport.write(chunk(FRAME) + end)  # type: ignore[attr-defined]
        if not self.left:
            self._running.discard(self)


def serve(listener: socket.socket, n_frames: int) -> None:
    """The server process, until it is ended."""

    async def tick() -> None:
        running: set[Streams] = set()
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: Streams(n_frames, running), sock=listener)
        while True:
            await asyncio.sleep(TICK_S)
            for stream in list(running):
                stream.tick()

    uvloop.run(tick())


async def with_ours(url: str, n_streams: int, n_rounds: int) -> None:
    pool = ConnectionPool(url)
    requests = [Sendable(request=REQUEST, n_exact=None)] * n_streams * n_rounds
    await closed_loop(requests, n_streams, Sender(pool, timeout_s=600), lambda record: None)
    pool.close()


async def with_aiohttp(url: str, n_streams: int, n_rounds: int) -> None:
    """The same reader of frames behind aiohttp."""

    async def user(session: aiohttp.ClientSession) -> None:
        for _ in range(n_rounds):
            reader = ReplyReader(time.perf_counter)
            async with session.post(url + PATH, data=BODY) as answer:
                reader.begin(answer.status)
                async for piece in answer.content.iter_any():
                    reader.receive(piece)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(user(session) for _ in range(n_streams)))


Client = Callable[[str, int, int], Coroutine[None, None, None]]
Run = Callable[[Coroutine[None, None, None]], None]


def measure(client: Client, run: Run, url: str, options: argparse.Namespace) -> str:
    n_frames = options.streams * options.frames * options.rounds
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    run(client(url, options.streams, options.rounds))
    cpu_s, elapsed_s = time.process_time() - cpu_s, time.perf_counter() - begun_s
    share, rate = cpu_s / elapsed_s, n_frames / elapsed_s
    return f"{1e6 * cpu_s / n_frames:5.1f} µs a frame, {share:4.0%} of a core at {rate:,.0f} frames/s"


def per_call_us(call: Callable[[], object]) -> float:
    begun_s = time.process_time()
    for _ in range(N_REPEATS):
        call()
    return 1e6 * (time.process_time() - begun_s) / N_REPEATS


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--frames", type=int, default=250, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(listener, options.frames), daemon=True
    )
    server.start()
    listener.close()
    payload = FRAME.removeprefix(b"data: ").strip()
    print(f"parse a frame of {len(payload)} bytes: {per_call_us(lambda: parsed(payload)):.2f} µs")
    print(f"with Python's json: {per_call_us(lambda: json.loads(payload)):.2f} µs")
    reader = ReplyReader(time.perf_counter)
    reader.begin(200)
    print(f"read it: {per_call_us(lambda: reader.receive(FRAME)):.2f} µs")
    for name, client in (("bench", with_ours), ("aiohttp", with_aiohttp)):
        for loop, run in (("uvloop", uvloop.run), ("asyncio", asyncio.run)):
            print(f"{name:7} on {loop:7}: {measure(client, run, url, options)}")
    server.terminate()


if __name__ == "__main__":
    main()
