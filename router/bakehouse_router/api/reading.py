"""Reads what a request says: its body, as one of the schemas, and the headers that mean something."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar
from urllib.parse import quote

from bakehouse_replica.core.errors import DeadlineExceeded, InvalidRequest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from bakehouse_router.api.bodies import Origin
from bakehouse_router.api.json_body import parse_object, read_body
from bakehouse_router.api.parse import Body, parse_body, parse_tolerantly
from bakehouse_router.calls import MAX_TIMEOUT_S
from bakehouse_router.settings import GatewaySettings

TIMEOUT_HEADER = "x-bakehouse-timeout-seconds"
IGNORED_FIELDS_HEADER = "x-bakehouse-ignored-fields"
# Parsing and checking take up to 0.4 ms per KiB (of short messages). Longer bodies go to a thread, and streams go
# on meanwhile.
_MAX_INLINE_BYTES = 32 * 1024
_MAX_NAMES_TOLD = 32
MAX_BODY_S = 120.0  # nobody waits longer for the rest of 4 MiB; a client that never sends it holds a connection
_JSON_MEDIA_TYPE = re.compile(r"application/([\w.-]+\+)?json")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?")

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Generic[Body]):
    """A body, and the paths of its fields that nobody knows. `is_long`: work on all of it is for a thread."""

    body: Body
    ignored: tuple[str, ...] = ()
    is_long: bool = False

    def headers(self) -> dict[str, str]:
        """Tells the client what was ignored; names are percent-encoded, as they may be any text."""
        if not self.ignored:
            return {}
        names = [quote(name, safe="[]") for name in self.ignored[:_MAX_NAMES_TOLD]]
        n_more = len(self.ignored) - len(names)
        return {IGNORED_FIELDS_HEADER: ", ".join([*names, f"and {n_more} more"] if n_more else names)}


def _check_encoding(request: Request) -> None:
    """Bodies are JSON in UTF-8, told so or not told at all.

    Anything else is refused although it might be JSON: a web page may send `text/plain`, or bytes without a type,
    to any address, but JSON only where CORS lets it. What a page sends across origins has an `Origin`.
    """
    told = request.headers.get("content-type", "")
    media_type = told.partition(";")[0].strip().lower()
    may_be_untold = "origin" not in request.headers
    if not _JSON_MEDIA_TYPE.fullmatch(media_type) and (media_type or not may_be_untold):
        raise HTTPException(415, f"the content type is {told[:100]!r}; it must be application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HTTPException(415, f"the content encoding is {encoding[:100]!r}; bodies must not be compressed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The fields of a body. `is_long`: checking them is work for a thread."""

    fields: dict[str, object]
    is_long: bool = False


async def in_thread_if(
    is_long: bool, work: Callable[Given, Result], *args: Given.args, **names: Given.kwargs
) -> Result:
    """The result of `work`, done here or in a thread."""
    return await asyncio.to_thread(work, *args, **names) if is_long else work(*args, **names)


async def receive(request: Request, settings: GatewaySettings) -> Received:
    """The body as a JSON object. Raises `InvalidRequest` where it is none, and `DeadlineExceeded` where it takes
    longer to arrive than a header allows, or than any body may."""
    _check_encoding(request)
    timeout_s = min(read_origin(request).timeout_s or MAX_BODY_S, MAX_BODY_S)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await read_body(request.stream(), request.headers, settings.max_body_bytes)
    except TimeoutError:
        raise DeadlineExceeded(f"the body had not arrived after {timeout_s:g} s, which is its limit") from None
    is_long = len(raw) > _MAX_INLINE_BYTES
    return Received(fields=await in_thread_if(is_long, parse_object, raw), is_long=is_long)


async def read_as(model: type[Body], received: Received, settings: GatewaySettings) -> Read[Body]:
    """What was received, as `model`. Raises `InvalidRequest` naming the first field that is wrong."""
    if settings.ignores_unknown_fields:
        body, ignored = await in_thread_if(received.is_long, parse_tolerantly, model, received.fields)
        return Read(body=body, ignored=ignored, is_long=received.is_long)
    body = await in_thread_if(received.is_long, parse_body, model, received.fields)
    return Read(body=body, is_long=received.is_long)


def tenant_of(request: Request) -> str:
    """Whose key the request came with; empty where nobody was asked for one."""
    tenant: str = getattr(request.state, "tenant", "")
    return tenant


def read_origin(request: Request) -> Origin:
    """What the headers say. Raises `InvalidRequest` naming the header that is wrong."""
    given: Sequence[str] = request.headers.getlist(TIMEOUT_HEADER)
    return Origin(tenant=tenant_of(request), timeout_s=_seconds(", ".join(given)) if given else None)


def _seconds(text: str) -> float:
    if not _SECONDS.fullmatch(text) or not 0 < float(text) <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"the header {TIMEOUT_HEADER} is {text[:60]!r}; it must be a number of seconds above 0 and at most "
            f"{MAX_TIMEOUT_S:g}",
            TIMEOUT_HEADER,
        )
    return float(text)
