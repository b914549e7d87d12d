"""Writes a Llama as a GGUF file the way llama.cpp's converter does."""

from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from transformers import LlamaConfig, PreTrainedModel

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def interleave_rows(weight: Array, n_heads: int) -> Array:
    """llama.cpp's order of query and key rows: pairs (i, i + D/2) become neighbours."""
    rows = weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    scalars: dict[str, int | str | float] | None = None,
    rope_factors: tuple[float, ...] | None = None,
) -> Path:
    """Write `model` with its matrices in `quantization`; `scalars` are added to the metadata."""
    config = model.config
    assert isinstance(config, LlamaConfig)
    assert config.num_key_value_heads is not None
    assert config.rope_parameters is not None
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"] or 0.0))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    for key, value in (scalars or {}).items():
        match value:
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    _add_tensors(writer, model, config, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(
    writer: GGUFWriter, model: PreTrainedModel, config: LlamaConfig, quantization: GGMLQuantizationType
) -> None:
    n_key_heads = config.num_key_value_heads or config.num_attention_heads
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array: Array = tensor.numpy()
        if ".q_proj." in name:
            array = interleave_rows(array, config.num_attention_heads)
        if ".k_proj." in name:
            array = interleave_rows(array, n_key_heads)
        kind = quantization if array.ndim == 2 else GGMLQuantizationType.F32
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name is not None
        writer.add_tensor(gguf_name, quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
