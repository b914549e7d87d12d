"""Launches of every kernel, in the shapes of models that are served: what is compiled ahead, tuned and timed.

Shapes: Llama-3-8B (32 query heads, 8 key heads of 128, width 4096, feed-forward 14,336, 128,256 ids), Qwen3-0.6B
(16, 8 of 128, 1024, 3072, 151,936), SmolLM2-135M (9, 3 of 64, 576), and heads of 80 and 256.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bakehouse_kernels.layout import DrawTensors, LogitChanges
from bakehouse_kernels.triton.activation import Activation, gated
from bakehouse_kernels.triton.ahead import Specialised, launches_of
from bakehouse_kernels.triton.attention_call import attention_call
from bakehouse_kernels.triton.attention_plan import TritonPlan, plan_attention
from bakehouse_kernels.triton.cache import TritonCache, new_cache
from bakehouse_kernels.triton.copy_blocks import copy_blocks
from bakehouse_kernels.triton.int8_matmul import Int8Weight, int8_matmul, quantised_rows
from bakehouse_kernels.triton.launch import DeviceClass
from bakehouse_kernels.triton.paged_attention import attend_ragged, paged_attention
from bakehouse_kernels.triton.penalties import adjust
from bakehouse_kernels.triton.rms_norm import rms_norm
from bakehouse_kernels.triton.rope_write import rope_and_write
from bakehouse_kernels.triton.sample import draw
from bakehouse_kernels.triton.shared_prefix import attend_shared
from bakehouse_kernels.triton.split_decode import attend_splits, combine_splits, new_partials

_BLOCK_SIZE, _SPLIT_TOKENS = 16, 512
_BF16, _F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class Make:
    """Tensors on one device."""

    device: torch.device

    def of(self, *shape: int, dtype: torch.dtype = _BF16) -> Tensor:
        """Normally distributed numbers, or integers of 0."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor.normal_() if dtype.is_floating_point else tensor.zero_()

    def full(self, n: int, value: float, dtype: torch.dtype) -> Tensor:
        """A number many times."""
        return torch.full((n,), value, dtype=dtype, device=self.device)


Case = Callable[[Make], Callable[[], object]]
"""Makes the tensors of a launcher's call, and returns the call."""


def norm(width: int, dtype: torch.dtype = _BF16, *, n_rows: int = 64) -> Case:
    """A norm of rows."""

    def case(make: Make) -> Callable[[], object]:
        x, weight = make.of(n_rows, width, dtype=dtype), make.of(width, dtype=dtype)
        return lambda: rms_norm(x, weight, 1e-5)

    return case


def activation(width: int, dtype: torch.dtype = _BF16, *, of: Activation = "silu", n_rows: int = 64) -> Case:
    """A gated activation that gives rows of `width`."""

    def case(make: Make) -> Callable[[], object]:
        gate_up = make.of(n_rows, 2 * width, dtype=dtype)
        return lambda: gated(gate_up, of)

    return case


def rope(n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype = _BF16, *, n_rows: int = 64) -> Case:
    """Rotation, and writing of keys and values."""

    def case(make: Make) -> Callable[[], object]:
        cache = _cache(make, n_kv_heads, head_dim, dtype, n_blocks=n_rows)
        qkv = make.of(n_rows, (n_heads + 2 * n_kv_heads) * head_dim, dtype=dtype)
        angles = make.of(n_rows, head_dim, dtype=_F32)
        slots = torch.arange(n_rows, device=make.device)
        return lambda: rope_and_write(qkv, angles, angles, cache, 0, slots)

    return case


def copies(n_copies: int = 64) -> Case:
    """Copies of blocks of 8 key heads of 128."""

    def case(make: Make) -> Callable[[], object]:
        cache = _cache(make, 8, 128, _BF16, n_blocks=2 * n_copies)
        source = torch.arange(n_copies, device=make.device)
        target = source + n_copies
        return lambda: copy_blocks(cache, source, target)

    return case


def rows_to_int8(width: int, *, n_rows: int = 64) -> Case:
    """Rounding of rows."""

    def case(make: Make) -> Callable[[], object]:
        x = make.of(n_rows, width)
        return lambda: quantised_rows(x)

    return case


def int8_product(n_rows: int, dtype: torch.dtype = _BF16) -> Case:
    """A product in 8 bits with the fused weight of Llama-3-8B's queries, keys and values."""

    def case(make: Make) -> Callable[[], object]:
        weight = Int8Weight(integers_OI=make.of(6144, 4096, dtype=torch.int8), scale_O=make.of(6144, dtype=_F32))
        x = make.of(n_rows, 4096, dtype=dtype)
        return lambda: int8_matmul(x, weight)

    return case


def draws(n_vocabulary: int, *, n_rows: int = 64) -> Case:
    """Draws with a nucleus."""

    def case(make: Make) -> Callable[[], object]:
        asks = DrawTensors(
            temperature_R=make.full(n_rows, 1.0, _F32),
            top_k_R=make.full(n_rows, 0, torch.int32),
            top_p_R=make.full(n_rows, 0.9, torch.float64),
            min_p_R=make.full(n_rows, 0.0, torch.float64),
            key_R=torch.arange(n_rows, device=make.device),
        )
        logits = make.of(n_rows, n_vocabulary, dtype=_F32)
        return lambda: draw(logits, asks)

    return case


def penalties(n_places: int = 8192, n_vocabulary: int = 128_256) -> Case:
    """Penalties on many tokens of one row."""

    def case(make: Make) -> Callable[[], object]:
        one = make.full(1, 1.1, _F32)
        changes = LogitChanges(
            repetition_R=one,
            presence_R=one,
            frequency_R=one,
            row_C=make.full(n_places, 0, torch.int32),
            id_C=torch.arange(n_places, dtype=torch.int32, device=make.device),
            is_seen_C=make.full(n_places, 1, torch.bool),
            count_C=make.full(n_places, 1, torch.int32),
            bias_C=make.full(n_places, 0.0, _F32),
        )
        logits = make.of(1, n_vocabulary, dtype=_F32)
        return lambda: adjust(logits, changes)

    return case


def attention(
    n_sequences: int,
    n_queries: int,
    context_len: int,
    *,
    head_dim: int,
    dtype: torch.dtype = _BF16,
    shares: bool = False,
) -> Case:
    """Attention of 32 query heads over 8 key heads, as a whole: all kernels of a step. Not on `meta`.

    `shares`: all sequences have the same blocks.
    """

    def case(make: Make) -> Callable[[], object]:
        n_blocks = -(-context_len // _BLOCK_SIZE)
        cache = _cache(make, 8, head_dim, dtype, n_blocks=n_sequences * n_blocks)
        for layer in (*cache.key, *cache.value):
            layer.normal_()
        tables = torch.arange(n_sequences * n_blocks, dtype=torch.int32).view(n_sequences, n_blocks)
        plan = plan_attention(
            tables[:1].repeat(n_sequences, 1) if shares else tables,
            torch.arange(n_sequences + 1, dtype=torch.int32) * n_queries,
            torch.full((n_sequences,), context_len, dtype=torch.int32),
            block_size=_BLOCK_SIZE,
            device=make.device,
        )
        q = make.of(n_sequences * n_queries, 32, head_dim, dtype=dtype)
        return lambda: paged_attention(q, cache, 0, plan, scale=head_dim**-0.5)

    return case


def _cache(make: Make, n_kv_heads: int, head_dim: int, dtype: torch.dtype, *, n_blocks: int) -> TritonCache:
    return new_cache(
        n_layers=1,
        n_blocks=n_blocks,
        block_size=_BLOCK_SIZE,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=make.device,
    )


CASES: Mapping[str, Case] = {
    "norm 576 bf16": norm(576),
    "norm 1024 bf16": norm(1024),
    "norm 4096 bf16": norm(4096),
    "norm 4096 f32": norm(4096, _F32),
    "norm 16384 bf16": norm(16_384),
    "silu 14336 bf16": activation(14_336),
    "silu 3072 f32": activation(3072, _F32),
    "gelu 14336 bf16": activation(14_336, of="gelu"),
    "rope 32/8x128 bf16": rope(32, 8, 128),
    "rope 9/3x64 f32": rope(9, 3, 64, _F32),
    "rope 8/4x80 bf16": rope(8, 4, 80),
    "rope 8/4x256 bf16": rope(8, 4, 256),
    "copies": copies(),
    "rows 14336 to int8": rows_to_int8(14_336),
    "int8 product of 1 row": int8_product(1),
    "int8 product of 64 rows": int8_product(64),
    "int8 product of 4096 rows": int8_product(4096),
    "int8 product of 64 rows f32": int8_product(64, _F32),
    "draw of 128256": draws(128_256),
    "penalties": penalties(),
}

ATTENTION: Mapping[str, tuple[int, int, int, torch.dtype, int | None, float | None]] = {
    "attention 9/3x64 bf16": (9, 3, 64, _BF16, None, None),
    "attention 32/8x80 bf16": (32, 8, 80, _BF16, None, None),
    "attention 32/8x128 bf16": (32, 8, 128, _BF16, None, None),
    "attention 16/8x128 bf16, window and soft-cap": (16, 8, 128, _BF16, 4096, 50.0),
    "attention 8/4x256 bf16": (8, 4, 256, _BF16, None, None),
    "attention 32/8x128 f32": (32, 8, 128, _F32, None, None),
}
"""Query heads, key heads, head dimension, dtype, window, soft-cap."""


def launches_of_case(name: str, device_class: DeviceClass) -> list[Specialised]:
    """What a case, of `CASES` or `ATTENTION`, launches on a device of the class.

    Of attention: tiles and splits, splits alone, shared splits, and what combines splits.
    """
    make = Make(torch.device("meta"))
    return launches_of(CASES[name](make) if name in CASES else all_attention(name)(make), device_class)


def all_attention(name: str) -> Case:
    """Each kernel of a case of `ATTENTION` once."""
    n_heads, n_kv_heads, head_dim, dtype, window, softcap = ATTENTION[name]

    def case(make: Make) -> Callable[[], object]:
        cache = _cache(make, n_kv_heads, head_dim, dtype, n_blocks=1)
        q_TND = make.of(4, n_heads, head_dim, dtype=dtype)
        plan = TritonPlan(
            array=make.of(64, dtype=torch.int32),
            block_size=_BLOCK_SIZE,
            split_tokens=_SPLIT_TOKENS,
            n_rows=4,
            n_tiles=1,
            n_members=2,
            max_splits=2,
            max_groups=1,
        )

        def call() -> None:
            settings = attention_call(q_TND, cache, 0, scale=1.0, window=window, softcap=softcap)
            partials = new_partials(settings, plan)
            for attend in (attend_ragged, attend_splits, attend_shared, combine_splits):
                attend(settings, plan, partials)

        return call

    return case
