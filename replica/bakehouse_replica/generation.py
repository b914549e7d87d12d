"""What a model's authors ask for when it generates: end ids and sampling defaults, read without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.gguf_metadata import read_gguf_metadata
from bakehouse_replica.source import ModelFiles

_GGUF_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """`eos_token_ids`: every id that ends an answer, ascending. A None means that the model does not say.

    `temperature`, `top_k`, `top_p` and `min_p` are given only where the model asks to be sampled
    (`do_sample`); without that they are leftovers of its training set-up.
    """

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_defaults(files: ModelFiles) -> GenerationDefaults:
    """From `generation_config.json` and `config.json` of a folder, or from the metadata of a GGUF file."""
    if files.is_gguf:
        metadata = read_gguf_metadata(files)
        end_ids = (metadata.integer(key) for key in _GGUF_END_KEYS)
        return GenerationDefaults(
            eos_token_ids=tuple(sorted({token for token in end_ids if token is not None})),
            bos_token_id=metadata.integer("tokenizer.ggml.bos_token_id"),
            temperature=files.sampling.temperature,
            top_p=files.sampling.top_p,
        )
    config = _read_object(files.path / "config.json")
    generation_path = files.path / "generation_config.json"
    generation = _read_object(generation_path) if generation_path.is_file() else {}
    is_sampled = generation.get("do_sample") is True
    return GenerationDefaults(
        eos_token_ids=tuple(sorted({*_ids(config, "eos_token_id"), *_ids(generation, "eos_token_id")})),
        bos_token_id=next(iter((*_ids(generation, "bos_token_id"), *_ids(config, "bos_token_id"))), None),
        temperature=_number(generation, "temperature") if is_sampled else files.sampling.temperature,
        # transformers writes 0 for "the whole vocabulary"
        top_k=(int(_number(generation, "top_k") or 0) or None) if is_sampled else None,
        top_p=_number(generation, "top_p") if is_sampled else files.sampling.top_p,
        min_p=_number(generation, "min_p") if is_sampled else None,
        repetition_penalty=_number(generation, "repetition_penalty"),
    )


def _read_object(path: Path) -> Mapping[str, object]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return value


def _ids(config: Mapping[str, object], key: str) -> tuple[int, ...]:
    """Token ids given as one number or a list of them."""
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return tuple(token for token in values if isinstance(token, int))


def _number(config: Mapping[str, object], key: str) -> float | None:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) else None
