"""The tokenizers that count prompts: the server's own over HTTP, or one on this machine."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import httpx
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.source import open_source

from bakehouse_cluster.bench.foreign import parsed
from bakehouse_cluster.bench.prompts import Encoder
from bakehouse_cluster.bench.reply import refusal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_MODEL = "smollm2"


class LocalEncoder:
    """The tokenizer of a model on this machine."""

    def __init__(self, name: str, backend: "Tokenizer") -> None:
        self.name = name
        self._backend = backend

    def encode(self, text: str) -> tuple[int, ...]:
        """See `Encoder`."""
        return tuple(self._backend.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Encoder`; special tokens left out."""
        return self._backend.decode(list(token_ids))


class VllmEncoder:
    """`/tokenize` and `/detokenize` as vLLM and bakehouse offer them. Raises `StartupError` where they refuse."""

    name = "the server's"

    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self._model = model

    def encode(self, text: str) -> tuple[int, ...]:
        """See `Encoder`."""
        reply = _post(self._http, "/tokenize", {"model": self._model, "prompt": text})
        return _ids(reply, "tokens")

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Encoder`."""
        reply = _post(self._http, "/detokenize", {"model": self._model, "tokens": list(token_ids)})
        return str(reply.get("prompt"))


class LlamaCppEncoder:
    """`/tokenize` and `/detokenize` as llama.cpp's server offers them. Raises `StartupError` where they refuse."""

    name = "the server's"

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def encode(self, text: str) -> tuple[int, ...]:
        """See `Encoder`."""
        reply = _post(self._http, "/tokenize", {"content": text, "add_special": True, "parse_special": True})
        return _ids(reply, "tokens")

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Encoder`."""
        return str(_post(self._http, "/detokenize", {"tokens": list(token_ids)}).get("content"))


def local_encoder(model: str) -> LocalEncoder:
    """The tokenizer of an alias, folder, GGUF file or hub id. Raises `StartupError` where there is none."""
    # Loads transformers, which a server's own tokenizer makes unnecessary.
    from bakehouse_replica.tokenizer_files import load_tokenizer

    return LocalEncoder(model, load_tokenizer(open_source(ModelSource(model=model))).backend_tokenizer)


def server_encoder(http: httpx.Client, model: str) -> Encoder | None:
    """The tokenizer of the server behind `http`, None where it offers none that is known here."""
    candidates: tuple[Encoder, ...] = (VllmEncoder(http, model), LlamaCppEncoder(http))
    for candidate in candidates:
        try:
            if candidate.encode("the time"):  # llama.cpp's answers a field that it does not know with no tokens
                return candidate
        except StartupError:
            continue
    return None


def _post(http: httpx.Client, path: str, body: Mapping[str, object]) -> dict[str, object]:
    try:
        reply = http.post(path, json=body)
        tree = parsed(reply.content) if reply.is_success else None
    except (httpx.HTTPError, ValueError) as error:
        raise StartupError(f"{path} of the server: {error}; name a tokenizer by --tokenizer") from error
    if not reply.is_success:
        raise StartupError(f"{path} of the server: {refusal(reply.status_code, reply.content)}")
    if not isinstance(tree, dict):
        raise StartupError(f"{path} of the server answers no JSON object; name a tokenizer by --tokenizer")
    return tree


def _ids(reply: dict[str, object], key: str) -> tuple[int, ...]:
    ids = reply.get(key)
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise StartupError("/tokenize of the server answers without token ids; name a tokenizer by --tokenizer")
    return tuple(ids)
