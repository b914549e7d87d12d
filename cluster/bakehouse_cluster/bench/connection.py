"""HTTP/1.1 connections that hand a reply's bytes to its reader as they come.

Straight from the socket to the reader, no task woken in between: 9 µs of CPU a frame on uvloop and 23 on
asyncio's own loop, reading included, where aiohttp's client takes 16 and 25 (64 streams, 6,000 frames/s, two busy
cores; `cluster/benchmarks/generator.py`). The generator often shares its cores with the server that it measures.
"""

import asyncio
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
from bakehouse_replica.core.errors import StartupError

_PORTS = {"http": 80, "https": 443}


class Broken(Exception):
    """The connection ended before the reply did. `is_unanswered`: not a byte of the reply had come."""

    def __init__(self, message: str, *, is_unanswered: bool) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered


class Reader(Protocol):
    """What a reply's bytes are handed to."""

    def begin(self, status: int) -> None:
        """The status has come."""
        ...

    def receive(self, piece: bytes) -> None:
        """A piece of the body, not empty."""
        ...

    def end(self) -> None:
        """The body is whole."""
        ...


class Connection(asyncio.Protocol):
    """One connection: one request at a time, in order."""

    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._has_length = False
        self._has_head = False
        self._has_bytes = False

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """Send `request`, whole, and return when `reader` has the whole reply.

        Raises `Broken` where the connection ends before. When cancelled, the connection is closed.
        """
        assert self._transport is not None, "asyncio makes the connection"
        assert self._ended is None, "one request at a time"
        if not self.is_open:
            raise Broken("the server had closed the connection", is_unanswered=True)
        self._reader, self._parser = reader, httptools.HttpResponseParser(self)
        self._has_length = self._has_head = self._has_bytes = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._ended = self._reader = None

    def close(self) -> None:
        """End the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._has_bytes = True
        if self._reader is None:  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # the reader's own, not the server's
            self._end_with(error.__context__ or error)
            self.close()
        except httptools.HttpParserError as error:
            self._break(f"the server does not speak HTTP/1.1: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._has_head and not self._has_length and error is None:
            self.on_message_complete()  # such a body ends with the connection
        else:
            self._break(f"the connection broke{f': {error}' if error else ' off'}")

    # What httptools calls.

    def on_message_begin(self) -> None:
        self._has_length = self._has_head = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._reader is not None:
            self._has_head = True
            self._reader.begin(status)

    def on_body(self, body: bytes) -> None:
        if self._reader is not None:
            self._reader.receive(body)

    def on_message_complete(self) -> None:
        if not self._has_head or self._reader is None or self._ended is None or self._ended.done():
            return  # an interim answer, or nobody waits any more
        self._has_head = False
        if not self._parser.should_keep_alive():
            self.close()
        try:
            self._reader.end()
        except Exception as error:  # asyncio would log it, and the request would wait for ever
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _break(self, message: str) -> None:
        self._end_with(Broken(message, is_unanswered=not self._has_bytes))

    def _end_with(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class ConnectionPool:
    """Connections to one server, kept open between requests."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or parts.hostname is None:
            raise StartupError(f"--url {url}: not an address like http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """As `Connection.exchange`, on any connection. Raises `OSError` where none can be made.

        A kept connection may turn out to be closed by the server; then the request is sent once more on a new one.
        """
        kept = self._pop_open()
        if kept is not None:
            try:
                await self._use(kept, request, reader)
            except Broken as error:
                if not error.is_unanswered:
                    raise
            else:
                return
        await self._use(await self._connect(), request, reader)

    def close(self) -> None:
        """End all that are kept."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    async def _use(self, connection: Connection, request: bytes, reader: Reader) -> None:
        await connection.exchange(request, reader)
        if connection.is_open:
            self._idle.append(connection)

    def _pop_open(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None
