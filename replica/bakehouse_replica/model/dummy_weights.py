"""Random weights of any shape, by which a model can be timed without its checkpoint.

What it says with them is noise. Shape legend in `bakehouse_kernels.layout`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bakehouse_replica.model.spec import ModelSpec

_SEED = 20240


def dummy_tensors(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    part_of: Callable[[str, Tensor], Tensor | None] = lambda _, whole: whole,
) -> dict[str, Tensor]:
    """By the names that a converted checkpoint has; made on `device`, always the same ones there.

    Of each only its `part_of` is kept (None: nothing) while the next is made. Each output of a matrix has the
    spread of its inputs, so that rows stay finite through any number of layers.
    """
    random = torch.Generator(device=device).manual_seed(_SEED)

    tensors: dict[str, Tensor] = {}

    def make(name: str, shape: tuple[int, ...], n_inputs: int) -> None:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            tensor.fill_(1.0 if "norm" in name else 0.0)
        else:
            tensor.normal_(std=n_inputs**-0.5, generator=random)
        part = part_of(name, tensor)
        if part is not None:
            tensors[name] = part

    table = (spec.vocabulary_size, spec.hidden_size)
    make("embedding_VE", table, spec.hidden_size)
    make("final_norm_E", (spec.hidden_size,), 1)
    if not spec.has_tied_head:
        make("head_VE", table, spec.hidden_size)
    for layer in range(spec.n_layers):
        for name, shape in layer_shapes(spec).items():
            make(f"layers.{layer}.{name}", shape, shape[0])
    return tensors


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each of a layer's tensors, by its name there."""
    width, inner, head_dim = spec.hidden_size, spec.feed_forward_size, spec.head_dim
    n_query, n_fused = spec.n_heads * head_dim, (spec.n_heads + 2 * spec.n_kv_heads) * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm_E": (width,),
        "qkv_EX": (width, n_fused),
        "output_QE": (n_query, width),
        "feed_forward_norm_E": (width,),
        "gate_up_EF2": (width, 2 * inner),
        "down_FE": (inner, width),
    }
    if spec.has_qkv_bias:
        shapes["qkv_bias_X"] = (n_fused,)
    if spec.has_output_bias:
        shapes["output_bias_E"] = (width,)
    if spec.has_feed_forward_bias:
        shapes |= {"gate_up_bias_F2": (2 * inner,), "down_bias_E": (width,)}
    if spec.has_qk_norm:
        shapes |= {"q_norm_D": (head_dim,), "k_norm_D": (head_dim,)}
    return shapes
