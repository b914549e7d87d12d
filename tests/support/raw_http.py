"""A real HTTP server whose every byte is scripted."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

# Bytes are sent as they are, an event is waited for; "close" and "reset" end the connection.
Step = bytes | asyncio.Event | Literal["close", "reset"]
Script = Sequence[Step]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(body: bytes) -> bytes:
    """As HTTP frames a part of a body."""
    return b"%x\r\n%s\r\n" % (len(body), body)


def stream(*events: str) -> bytes:
    """A whole reply of these events."""
    return HEAD + b"".join(chunk(f"data: {event}\n\n".encode()) for event in events) + LAST_CHUNK


def refusal(status: int, message: str) -> bytes:
    """A whole reply in OpenAI's envelope."""
    body = b'{"error": {"message": "%s"}}' % message.encode()
    return b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@dataclass
class RawServer:
    """`scripts[i]` answers request i, the last one all later ones. `requests`: heads and bodies as they came."""

    scripts: Sequence[Script]
    url: str = ""
    n_connections: int = 0
    n_open: int = 0
    n_open_most: int = 0
    requests: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(head + await reader.readexactly(length))
        self.n_open += 1
        self.n_open_most = max(self.n_open_most, self.n_open)
        try:
            return await self._play(script, writer)
        finally:
            self.n_open -= 1

    async def _play(self, script: Script, writer: asyncio.StreamWriter) -> bool:
        for step in script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif step == "close":
                return False
            elif step == "reset":
                writer.transport.abort()
                return False
            else:
                writer.write(step)
                await writer.drain()
                await asyncio.sleep(0)  # each step is a packet of its own
        return True


@asynccontextmanager
async def raw_server(*scripts: Script) -> AsyncGenerator[RawServer, None]:
    """A server on a free port of the loopback."""
    state = RawServer(scripts)
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
