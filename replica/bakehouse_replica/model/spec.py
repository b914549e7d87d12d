"""A model's shape and options, read from a Hugging Face `config.json` or from GGUF metadata.

What the decoder does not support is refused by name; nothing is ignored in silence.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.gguf_metadata import GGUFMetadata, read_gguf_metadata
from bakehouse_replica.source import ModelFiles

_MODEL_TYPES = ("llama", "mistral", "qwen3")
# Their frequencies do not depend on the length of the sequence at hand, as those of "dynamic" and "longrope" do.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_GGUF_ROPE_TYPES = ("none", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything a decoder must know besides its weights.

    `rope_frequencies`: radians per position of the D/2 rotated pairs, scaling included; cosine and sine are
    multiplied by `rope_gain`. `window`: how many positions a token sees, itself included; None for all.
    `has_qk_norm`: each head of query and key is normalised before it is rotated.
    """

    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    feed_forward_size: int
    vocabulary_size: int
    context_length: int
    norm_eps: float
    rope_frequencies: tuple[float, ...]
    rope_gain: float = 1.0
    window: int | None = None
    has_tied_head: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_feed_forward_bias: bool = False
    has_qk_norm: bool = False

    @property
    def n_parameters(self) -> int:
        """Numbers that the weights hold, biases and norms left out: a few thousandths at most."""
        attention = self.hidden_size * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        feed_forward = 3 * self.hidden_size * self.feed_forward_size
        vocabulary = self.hidden_size * self.vocabulary_size * (1 if self.has_tied_head else 2)
        return self.n_layers * (attention + feed_forward) + vocabulary

    @property
    def n_outputs(self) -> int:
        """Outputs of all matrices together, the head's included."""
        qkv = self.head_dim * (self.n_heads + 2 * self.n_kv_heads)
        return self.n_layers * (qkv + 2 * self.feed_forward_size + 2 * self.hidden_size) + self.vocabulary_size


def read_spec(files: ModelFiles) -> ModelSpec:
    """The spec of a model; `StartupError` names what is not supported."""
    spec = _from_gguf(read_gguf_metadata(files), files.name) if files.is_gguf else _from_folder(files)
    for what in ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "feed_forward_size"):
        _require(getattr(spec, what) >= 1, files.name, what, getattr(spec, what), ("at least 1",))
    shared = spec.n_heads % spec.n_kv_heads == 0
    _require(shared, files.name, "n_kv_heads", spec.n_kv_heads, (f"a divisor of n_heads, {spec.n_heads}",))
    return spec


class _LlamaConfig(Protocol):
    """The fields of transformers' LlamaConfig, MistralConfig and Qwen3Config that are read here."""

    architectures: list[str] | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope_parameters: dict[str, object]


def _from_folder(files: ModelFiles) -> ModelSpec:
    raw = json.loads((files.path / "config.json").read_text())
    model_type = raw.get("model_type")
    _require(model_type in _MODEL_TYPES, files.name, "model type", model_type, _MODEL_TYPES)
    _require("quantization_config" not in raw, files.name, "quantised weights", raw.get("quantization_config"), ())
    config = cast(_LlamaConfig, AutoConfig.from_pretrained(files.path, local_files_only=True))
    for architecture in config.architectures or ():
        _require(architecture.endswith("ForCausalLM"), files.name, "architecture", architecture, ("*ForCausalLM",))
    _require(config.hidden_act == "silu", files.name, "activation", config.hidden_act, ("silu",))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if model_type == "qwen3":
        has_windows = bool(raw.get("use_sliding_window", False))
        _require(not has_windows, files.name, "use_sliding_window", has_windows, ("False",))
    frequencies, gain = _rope(config, head_dim, files.name)
    has_attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        n_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        feed_forward_size=config.intermediate_size,
        vocabulary_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope_frequencies=frequencies,
        rope_gain=gain,
        window=getattr(config, "sliding_window", None),
        has_tied_head=config.tie_word_embeddings,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_feed_forward_bias=bool(getattr(config, "mlp_bias", False)),
        has_qk_norm=model_type == "qwen3",
    )


def _rope(config: _LlamaConfig, head_dim: int, name: str) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    rope_type = str(parameters["rope_type"])
    _require(rope_type in _ROPE_TYPES, name, "rope type", rope_type, _ROPE_TYPES)
    share = parameters.get("partial_rotary_factor", 1.0)
    _require(share == 1.0, name, "partial_rotary_factor", share, ("1.0",))
    if rope_type == "default":
        return _plain_frequencies(cast(float, parameters["rope_theta"]), head_dim), 1.0
    initialise = cast(Callable[[_LlamaConfig], tuple[torch.Tensor, float]], ROPE_INIT_FUNCTIONS[rope_type])
    frequencies, gain = initialise(config)
    return tuple(frequencies.tolist()), gain


def _plain_frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return tuple((1.0 / theta**exponents).tolist())


def _from_gguf(metadata: GGUFMetadata, name: str) -> ModelSpec:
    _require(metadata.architecture == "llama", name, "GGUF architecture", metadata.architecture, ("llama",))
    n_experts = metadata.integer("llama.expert_count") or 0
    _require(n_experts == 0, name, "number of experts", n_experts, ("0",))
    hidden_size = _required_integer(metadata, "llama.embedding_length", name)
    n_heads = _required_integer(metadata, "llama.attention.head_count", name)
    head_dim = metadata.integer("llama.attention.key_length") or hidden_size // n_heads
    rotated = metadata.integer("llama.rope.dimension_count") or head_dim
    _require(rotated == head_dim, name, "number of rotated dimensions", rotated, (str(head_dim),))
    shapes = metadata.shapes
    return ModelSpec(
        n_layers=_required_integer(metadata, "llama.block_count", name),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=metadata.integer("llama.attention.head_count_kv") or n_heads,
        head_dim=head_dim,
        feed_forward_size=_required_integer(metadata, "llama.feed_forward_length", name),
        vocabulary_size=shapes["token_embd.weight"][0],
        context_length=_required_integer(metadata, "llama.context_length", name),
        norm_eps=metadata.number("llama.attention.layer_norm_rms_epsilon") or 1e-5,
        rope_frequencies=_gguf_frequencies(metadata, head_dim, name),
        has_tied_head="output.weight" not in shapes,
        has_qkv_bias="blk.0.attn_q.bias" in shapes,
        has_output_bias="blk.0.attn_output.bias" in shapes,
        has_feed_forward_bias="blk.0.ffn_down.bias" in shapes,
    )


def _gguf_frequencies(metadata: GGUFMetadata, head_dim: int, name: str) -> tuple[float, ...]:
    rope_type = str(metadata.scalars.get("llama.rope.scaling.type", "none"))
    _require(rope_type in _GGUF_ROPE_TYPES, name, "rope type", rope_type, _GGUF_ROPE_TYPES)
    plain = _plain_frequencies(metadata.number("llama.rope.freq_base") or 10000.0, head_dim)
    scale = (metadata.number("llama.rope.scaling.factor") or 1.0) if rope_type == "linear" else 1.0
    # llama.cpp stores Llama 3's rope scaling as one divisor per rotated pair.
    factors = metadata.rope_factors or (1.0,) * len(plain)
    return tuple(frequency / (scale * factor) for frequency, factor in zip(plain, factors, strict=True))


def _required_integer(metadata: GGUFMetadata, key: str, name: str) -> int:
    value = metadata.integer(key)
    if value is None:
        raise StartupError(f"model {name!r}: its GGUF metadata lacks {key}")
    return value


def _require(condition: bool, name: str, what: str, value: object, supported: tuple[str, ...]) -> None:
    if not condition:
        known = f" (supported: {', '.join(supported)})" if supported else ""
        raise StartupError(f"model {name!r}: {what} {value!r} is not supported{known}")
