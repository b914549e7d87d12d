"""Server-sent events: framing, and a response that ends its source the moment the client is gone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Proxies must neither collect nor keep the events.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


# As `json.dumps` would with these arguments, which however makes a new encoder for each call.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(payload: Mapping[str, object], name: str | None = None) -> bytes:
    """One event; `name` where clients tell events apart by it."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {to_json(payload)}\n\n".encode()


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `frames` as they come; when they end, when the client goes, or when sending fails, closes them and the
    `source` that they are made from (which they cannot close where they were never begun).

    Starlette's own streaming response leaves the closing to the garbage collector where the client goes while a
    frame is being sent, and notices a client that goes while no frame comes only under older ASGI versions.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncGenerator[bytes, None], source: AsyncGenerator[object, None], headers: Mapping[str, str]
    ) -> None:
        self._frames = frames
        self._source = source
        self.status_code = 200
        self.background = None
        self.init_headers({**STREAM_HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        listening = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((sending, listening), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except (OSError, ClientDisconnect):
            return  # the client went while a frame was on its way: nobody is left to be told
        finally:
            sending.cancel()
            listening.cancel()
            await asyncio.gather(sending, listening, return_exceptions=True)
            await self._frames.aclose()
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
