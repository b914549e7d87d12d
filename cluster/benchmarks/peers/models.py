"""Writes one model in the formats that the peers read, from the GGUF file that `bakehouse` itself serves.

All systems so compute with the same weights, those of the file after dequantisation; each format is written once.
"""

import os
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import gguf
import numpy as np
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.model.checkpoint import open_checkpoint
from bakehouse_replica.model.spec import read_spec
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_replica.tokenizer_files import load_gguf_tokenizer
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from transformers import AutoConfig

Report = Callable[[str], None]

# Written anew where its number grows.
_FORMAT = "peers-1"


class Weights(StrEnum):
    """A format of the weights. `HF_FLOAT32`: a Hugging Face folder; the others are GGUF files."""

    HF_FLOAT32 = "hf-float32"
    GGUF_FLOAT32 = "f32"
    GGUF_FLOAT16 = "f16"
    GGUF_BFLOAT16 = "bf16"
    GGUF_Q8_0 = "q8_0"
    GGUF_ORIGINAL = "original"


_TYPE_OF = {
    Weights.GGUF_FLOAT32: (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    Weights.GGUF_FLOAT16: (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    Weights.GGUF_BFLOAT16: (GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    Weights.GGUF_Q8_0: (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


class ModelFormats:
    """The formats of `model`, which must be a GGUF file or an alias of one, kept under `folder`."""

    def __init__(self, model: str, folder: Path, report: Report) -> None:
        self._files = open_source(ModelSource(model=model))
        if not self._files.is_gguf:
            raise ValueError(f"model {model!r} is no GGUF file, from which the peers' formats are written")
        self._folder = folder / _FORMAT / self._files.digest
        self._report = report

    def path(self, weights: Weights) -> Path:
        """The model in this format, written now if it is not there yet."""
        if weights is Weights.GGUF_ORIGINAL:
            return self._files.path
        is_folder = weights is Weights.HF_FLOAT32
        path = self._folder / (weights.value if is_folder else f"{weights.value}.gguf")
        if path.exists():
            return path
        self._report(f"writing {path}")
        self._folder.mkdir(parents=True, exist_ok=True)
        # It appears whole or not at all, whenever this is interrupted.
        with tempfile.TemporaryDirectory(dir=self._folder) as made:
            whole = Path(made) / path.name
            if is_folder:
                write_hugging_face(self._files, whole)
            else:
                write_gguf(self._files.path, whole, *_TYPE_OF[weights])
            os.rename(whole, path)
        return path


def write_hugging_face(files: ModelFiles, folder: Path) -> None:
    """Write a GGUF model as a Hugging Face folder in float32: configuration, weights, tokenizer."""
    config = AutoConfig.from_pretrained(files.path.parent, gguf_file=files.path.name, local_files_only=True)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(folder)
    load_gguf_tokenizer(files).save_pretrained(folder)
    with open_checkpoint(files, read_spec(files)) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in _llama_names(config.num_hidden_layers)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _llama_names(n_layers: int) -> list[str]:
    # The head is tied to the embedding in all models of which this package ships one.
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    layers = [f"model.layers.{layer}.{part}.weight" for layer in range(n_layers) for part in parts]
    return ["model.embed_tokens.weight", "model.norm.weight", *layers]


def write_gguf(source: Path, path: Path, kind: GGMLQuantizationType, file_type: gguf.LlamaFileType) -> None:
    """Copy a GGUF file with its matrices as `kind`, the embedding too, and its vectors in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, arch=str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stored = GGMLQuantizationType.F32 if values.ndim == 1 else kind
        writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
