"""The shapes that `gpu.py` times: their configurations, and what a step of them moves and computes at least."""

import json
from dataclasses import dataclass
from pathlib import Path

from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.source import ModelFiles, open_source

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_QWEN3_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16"}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
SHAPES = {"llama-3-8b": _LLAMA_8B, "qwen3-0.6b": _QWEN3_600M}


def open_shape(name: str, folder: Path, *, is_tiny: bool) -> ModelFiles:
    """A folder with the shape's `config.json` alone, to be given dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = _COMMON | SHAPES[name] | (_TINY if is_tiny else {})
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    return open_source(ModelSource(model=str(folder), weights="dummy"), cache_root=folder)


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps of a shape cost at least; `element_bytes` of a weight, a key and a value alike."""

    spec: ModelSpec
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        spec = self.spec
        return 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * self.element_bytes

    @property
    def n_multiplied(self) -> int:
        """Weights that each token's row meets: all but the embedding, in which rows are looked up."""
        spec = self.spec
        return spec.n_parameters - (0 if spec.has_tied_head else spec.hidden_size * spec.vocabulary_size)

    def decode_bytes(self, batch: int, context: int) -> int:
        """All weights once, and the keys and values of all contexts."""
        return self.n_multiplied * self.element_bytes + batch * context * self.token_bytes

    def operations(self, n_tokens: int, n_pairs: int, n_logits: int) -> int:
        """Multiplications and additions of a step whose queries meet `n_pairs` keys in each head."""
        spec = self.spec
        head = spec.hidden_size * spec.vocabulary_size
        products = n_tokens * (self.n_multiplied - head) + n_logits * head
        return 2 * products + 4 * n_pairs * spec.n_layers * spec.n_heads * spec.head_dim

    def decode_floor_s(self, batch: int, context: int, bytes_per_s: float, operations_per_s: float) -> float:
        """No decode step is faster."""
        operations = self.operations(batch, batch * context, batch)
        return max(self.decode_bytes(batch, context) / bytes_per_s, operations / operations_per_s)
