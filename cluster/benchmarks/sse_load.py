"""Opens many streams at once and prints, as one line of JSON, what arrived; costs next to nothing.

It neither parses frames nor keeps them, because it runs on the cores that it measures: it counts the `data:`
fields, notes when bytes came, and reads the usage in the last event, by which all tokens must have arrived. Run by
the other benchmarks of this folder, in a process of its own:

    .venv/bin/python cluster/benchmarks/sse_load.py http://127.0.0.1:8000 --streams 64 --tokens 1000
"""

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import cast
from urllib.parse import urlsplit

FRAME = b"data: "
DONE = b"data: [DONE]"
# The last two events, usage and `[DONE]`, and the framing around them.
TAIL_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """All streams together; `elapsed_s` from the first request to the last `[DONE]`, prefill included."""

    n_streams: int
    n_tokens: int
    n_frames: int
    elapsed_s: float
    first_s: float
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float


class Stream(asyncio.Protocol):
    """One request over one connection."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.n_frames = 0
        self.arrivals: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's does not inherit from it
        self._transport.write(self._request)

    def data_received(self, received: bytes) -> None:
        if not self._tail and not received.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(f"refused: {received!r}"))
            self._transport.close()
            return
        n_frames = received.count(FRAME)
        if n_frames:
            self.n_frames += n_frames
            self.arrivals.append(time.perf_counter())
        self._tail = (self._tail + received)[-TAIL_BYTES:]
        if DONE in self._tail and not self.ended.done():
            self.ended.set_result(None)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"a stream broke: {error or self._tail!r}"))

    @property
    def n_tokens(self) -> int:
        """By the server's own usage, in the event before `[DONE]`."""
        event = self._tail.rpartition(DONE)[0].rpartition(FRAME)[2].partition(b"\n\n")[0]
        n_tokens: int = json.loads(event)["usage"]["completion_tokens"]
        return n_tokens


def request_of(url: str, model: str, prompt: list[int], n_tokens: int) -> bytes:
    """The bytes of one streaming completions request."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def load(url: str, model: str, *, n_streams: int, n_tokens: int, n_prompt: int) -> Arrived:
    """Raises where a stream broke or a token is missing. Each prompt is another one: no prefix is shared."""
    loop, address = asyncio.get_running_loop(), urlsplit(url)
    begun_s = time.perf_counter()
    streams = []
    for index in range(n_streams):
        prompt = [1000 + (index * 7919 + position) % 40000 for position in range(n_prompt)]
        request = request_of(url, model, prompt, n_tokens)
        _, stream = await loop.create_connection(
            lambda request=request: Stream(request),  # type: ignore[misc]
            address.hostname,
            address.port,
        )
        streams.append(stream)
    await asyncio.gather(*(stream.ended for stream in streams))
    elapsed_s = time.perf_counter() - begun_s
    total = sum(stream.n_tokens for stream in streams)
    assert total == n_streams * n_tokens, f"{total} tokens arrived of {n_streams * n_tokens}"
    gaps = sorted(
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    )
    return Arrived(
        n_streams=n_streams,
        n_tokens=total,
        n_frames=sum(stream.n_frames for stream in streams),
        elapsed_s=elapsed_s,
        first_s=max(stream.arrivals[0] for stream in streams) - begun_s,
        gap_p50_s=gaps[len(gaps) // 2],
        gap_p99_s=gaps[len(gaps) * 99 // 100],
        gap_max_s=gaps[-1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    asked = parser.parse_args()
    import uvloop  # comes with Ray; here, because only the generator itself needs it

    arrived = uvloop.run(
        load(asked.url, asked.model, n_streams=asked.streams, n_tokens=asked.tokens, n_prompt=asked.prompt)
    )
    print(json.dumps(asdict(arrived)))


if __name__ == "__main__":
    main()
