"""Asks a server, before it is measured, what it serves and how it tokenizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from bakehouse_replica.core.errors import StartupError

from bakehouse_cluster.bench.encoders import DEFAULT_MODEL, local_encoder, server_encoder
from bakehouse_cluster.bench.foreign import parsed, printable
from bakehouse_cluster.bench.prompts import Encoder
from bakehouse_cluster.reaching import unreachable

THE_SERVERS = "server"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A server that answers. `url`: without `/v1`. `software`: the owner of its model and its `Server` header, as
    far as told. `encoder`: counts prompts for it.
    """

    url: str
    model: str
    software: str
    encoder: Encoder


@contextmanager
def found_server(
    url: str, *, key: str | None = None, model: str | None = None, tokenizer: str | None = None
) -> Iterator[FoundServer]:
    """The server at `url`, with or without `/v1`, and `model`, or else the first that it serves.

    `tokenizer`: "server", or a model whose tokenizer is on this machine or the hub; None: the server's where it
    offers one, else that of the default model. Raises a `StartupError` of one line where anything is missing.
    """
    url = url.rstrip("/").removesuffix("/v1")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise StartupError(f"--url {url}: {error}") from error
    with http:
        chosen, software = _find_model(http, url, model)
        encoder = _choose_encoder(http, chosen, tokenizer)
        yield FoundServer(url=url, model=chosen, software=software, encoder=encoder)


def _choose_encoder(http: httpx.Client, model: str, tokenizer: str | None) -> Encoder:
    if tokenizer not in (None, THE_SERVERS):
        return local_encoder(tokenizer)
    encoder = server_encoder(http, model)
    if encoder is not None:
        return encoder
    if tokenizer == THE_SERVERS:
        raise StartupError("the server offers no /tokenize; name its model's tokenizer by --tokenizer")
    return local_encoder(DEFAULT_MODEL)


def _find_model(http: httpx.Client, url: str, model: str | None) -> tuple[str, str]:
    try:
        reply = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise StartupError(unreachable(url, error)) from error
    if reply.status_code in (401, 403):
        raise StartupError(f"{url} asks for a key; give it by --key or BAKEHOUSE_API_KEY")
    owners = owners_in(reply)
    if owners is None:
        raise StartupError(
            f"{url}/v1/models: HTTP {reply.status_code} without a list of models; "
            f"--url is the address of a server with OpenAI's API, without /v1"
        )
    if not owners:
        raise StartupError(f"{url} serves no model")
    if model is not None and model not in owners:
        raise StartupError(f"{url} does not serve {model!r}; it serves {', '.join(owners)}")
    name = next(iter(owners)) if model is None else model
    told = (owners[name], printable(reply.headers.get("server", "")))
    return name, ", ".join(one for one in told if one)


def owners_in(reply: httpx.Response) -> dict[str, str] | None:
    """The owner of each model that `/v1/models` lists, None where that is not what the reply is."""
    try:
        tree = parsed(reply.content) if reply.is_success else None
    except ValueError:
        return None
    models = tree.get("data") if isinstance(tree, dict) else None
    if not isinstance(models, list):
        return None
    owners: dict[str, str] = {}
    for one in models:
        name = one.get("id") if isinstance(one, dict) else None
        if not isinstance(name, str) or printable(name) != name:
            return None
        owners[name] = printable(str(one.get("owned_by") or ""))
    return owners
