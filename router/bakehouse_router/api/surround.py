"""What holds for every request, whatever its route: an id, and an envelope around what nobody else has caught."""

import logging
import secrets
from collections.abc import Callable

from bakehouse_replica.core.errors import BakehouseError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bakehouse_router.api.errors import problem_of
from bakehouse_router.api.recorded import note_error

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_MAX_REQUEST_ID_CHARS = 128


def usable_request_id(given: str) -> str:
    """The client's own id where it is one that may stand in a log line; otherwise a new one."""
    if 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(16)}"


def error_response(error: Exception, request_id: str) -> Response:
    """`error` in the envelope, under its status."""
    problem = problem_of(error, request_id)
    headers = problem.headers()
    if isinstance(error, HTTPException) and error.headers:  # which methods a route allows, for example
        headers |= error.headers
    return JSONResponse(problem.envelope(), problem.status, headers=headers)


async def refuse(error: BakehouseError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends `error` as the whole response; for what stands between `Surround` and the routes."""
    note_error(scope, error)
    await error_response(error, scope["state"]["request_id"])(scope, receive, send)


class Surround:
    """Gives every request an id and answers 500 where an error has come this far.

    The id is `request.state.request_id` and, where it `tells_request_id`, a header of the response. `on_failure`
    gets what is answered by 500.
    """

    def __init__(self, app: ASGIApp, *, tells_request_id: bool, on_failure: Callable[[Exception], None]) -> None:
        self._app = app
        self._on_failure = on_failure
        self._tells_request_id = tells_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = usable_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if self._tells_request_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_begun:
                raise
            logger.exception("request %s failed", request_id)
            self._on_failure(error)
            await error_response(error, request_id)(scope, receive, send_with_id)
