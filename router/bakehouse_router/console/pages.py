"""Serves the files of the console page, which are the same for everybody and hold no secret.

What the page shows it asks the API for, with the key of whoever looks at it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

_FILES = (
    "api.js",
    "cells.js",
    "chat.js",
    "console.css",
    "fleet.js",
    "format.js",
    "icon.svg",
    "key.js",
    "main.js",
)
_NAMES = {"/": "index.html", **{f"/console/{name}": name for name in _FILES}}
# What anybody may read without a key.
CONSOLE_PATHS = frozenset(_NAMES)
# Machines have tables of their own, and a script of another type would not run.
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",  # kept, but asked about each time: all files are of one version
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def console_handlers() -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
    """For each of `CONSOLE_PATHS` what answers its GET and HEAD; reads the files."""
    folder = files(__package__) / "static"
    return {path: partial(_answer, _file(folder / name)) for path, name in _NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def _file(path: Traversable) -> _File:
    content = path.read_bytes()
    # Starlette's own `StaticFiles` makes it of size and time; but all files of a wheel have one time, and those of
    # images the time at which they were unpacked.
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    return _File(content=content, media_type=_MEDIA_TYPES[path.name.rpartition(".")[2]], etag=etag)


async def _answer(file: _File, request: Request) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    known = request.headers.get("if-none-match", "")
    if file.etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
