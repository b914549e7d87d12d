"""All operations of the GPU path together, in the interpreter."""

import math

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.reference import PlayedAnew, QuantisedReferenceOps, ReferenceOps
from bakehouse_kernels.triton.ops import TritonOps
from torch import Tensor

from tests.kernels.test_survey import KINDS, assert_same, rows_of
from tests.kernels.triton.conftest import Close

CPU = torch.device("cpu")


def ops_of(dtype: torch.dtype, *, is_int8: bool = False) -> Ops:
    """Typed as the protocol, which mypy checks."""
    return TritonOps(CPU, dtype, is_int8=is_int8)


@pytest.mark.parametrize("n_rows", [0, 1, 3])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_their_definition(
    close: Close, generator: torch.Generator, dtype: torch.dtype, is_int8: bool, n_rows: int
) -> None:
    ops = ops_of(dtype, is_int8=is_int8)
    reference = QuantisedReferenceOps() if is_int8 else ReferenceOps()
    x = torch.randn(n_rows, 12, generator=generator).to(dtype)
    weight = (torch.randn(12, 10, generator=generator) / 4).to(dtype)
    bias = torch.randn(10, generator=generator).to(dtype)
    total = torch.randn(n_rows, 10, generator=generator).to(dtype)
    # Sums, biases and gates around 2 are rounded on the way, in the interpreter all towards zero, by 2^-7 each.
    absolute = 0.08 if dtype == torch.bfloat16 else 1e-5
    for given in (None, bias):
        close(
            ops.linear(x, ops.pack(weight), given),
            reference.linear(x, reference.pack(weight), given),
            absolute=absolute,
        )
        close(
            ops.gated_linear(x, ops.pack_gated(weight), given),
            reference.gated_linear(x, reference.pack_gated(weight), given),
            absolute=absolute,
        )
        found, expected = total.clone(), total.clone()
        ops.add_linear(found, x, ops.pack(weight), given)
        reference.add_linear(expected, x, reference.pack(weight), given)
        close(found, expected, absolute=absolute)


@pytest.mark.parametrize("n_vocabulary", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_equals_its_definition(generator: torch.Generator, kind: str, n_vocabulary: int) -> None:
    logits = rows_of(kind, n_vocabulary, generator)
    before = logits.clone()
    temperature = torch.tensor([0.0, 1.0, 0.8, 3.0, 100.0, 1e-3, 1e-30, torch.finfo(torch.float32).tiny, 1.0, 0.0])
    for n_best in (1, 2, 64, n_vocabulary + 5):
        found = ops_of(torch.float32).survey(logits, temperature, n_best)
        assert_same(found, ReferenceOps().survey(logits, temperature, n_best))
    assert logits.equal(before)


def test_a_survey_in_slices_is_the_same(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    logits, temperature = torch.randn(7, 300, generator=generator), torch.rand(7, generator=generator)
    whole = ops_of(torch.float32).survey(logits, temperature, 5)
    monkeypatch.setattr("bakehouse_kernels.triton.survey._SLICE", 600)
    assert_same(ops_of(torch.float32).survey(logits, temperature, 5), whole)
    assert ops_of(torch.float32).survey(logits[:0], temperature[:0], 5).id_RK.shape == (0, 5)


def test_a_row_with_a_nan_or_an_infinite_best_says_so() -> None:
    logits = torch.zeros(3, 400)
    logits[0, 399], logits[1, 5] = torch.nan, torch.inf
    found = ops_of(torch.float32).survey(logits, torch.ones(3), 2)
    assert found.value_RK[0].isnan().all()
    assert found.value_RK[1, 0] == torch.inf
    assert found.total_R.tolist() == [0.0, 0.0, 400.0]


def _layer(ops: Ops, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """What a layer makes of a prompt of five tokens, then of one more, whose blocks have been copied."""
    n_heads, n_kv_heads, head_dim, width = 4, 2, 16, 24

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / math.sqrt(shape[0])).to(dtype)

    qkv, output = ops.pack(weight(width, 8 * head_dim)), ops.pack(weight(n_heads * head_dim, width))
    gate_up, down, gain = ops.pack_gated(weight(width, 40)), ops.pack(weight(20, width)), weight(width)
    cache = ops.new_cache(n_layers=1, n_blocks=6, block_size=4, n_kv_heads=n_kv_heads, head_dim=head_dim)
    x_TE, results = weight(6, width), []
    angles = torch.outer(torch.arange(6), torch.rand(head_dim // 2, generator=generator))
    angles = torch.cat((angles, angles), dim=1)
    for rows, table, context in ((slice(0, 5), [[1, 3]], 5), (slice(5, 6), [[1, 4]], 6)):
        x = x_TE[rows].clone()
        if context == 6:
            ops.copy_blocks(cache, torch.tensor([3]), torch.tensor([4]))
        plan = ops.plan_attention(
            torch.tensor(table, dtype=torch.int32),
            torch.tensor([0, len(x)], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
        )
        slots = torch.tensor([table[0][p // 4] * 4 + p % 4 for p in range(context - len(x), context)])
        qkv_TX = ops.linear(ops.rms_norm(x, gain, 1e-5), qkv)
        q_TND = ops.rope_and_write(qkv_TX, angles[rows].cos(), angles[rows].sin(), cache, 0, slots)
        attended = ops.paged_attention(q_TND, cache, 0, plan, scale=head_dim**-0.5)
        ops.add_linear(x, attended.flatten(1), output)
        ops.add_linear(x, ops.gated_linear(ops.rms_norm(x, gain, 1e-5), gate_up), down)
        results.append(x)
    return torch.cat(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_equals_its_definition_over_prefill_copy_and_decode(close: Close, dtype: torch.dtype) -> None:
    found = _layer(ops_of(dtype), torch.Generator().manual_seed(3), dtype)
    expected = _layer(ReferenceOps(dtype=dtype), torch.Generator().manual_seed(3), dtype)
    # Ten roundings to bfloat16 of numbers around 2, in the interpreter all towards zero.
    close(found, expected, absolute=0.1 if dtype == torch.bfloat16 else 1e-5)


def test_without_cuda_recordings_are_played_anew(generator: torch.Generator) -> None:
    ops = ops_of(torch.float32)
    x, weight = torch.randn(2, 4, generator=generator), ops.pack(torch.randn(4, 3, generator=generator))
    recording = ops.record(lambda recorded: recorded.linear(x, weight))
    assert isinstance(recording, PlayedAnew)
    recording.play()
    assert recording.result.equal(ops.linear(x, weight))


def test_a_plan_needs_a_cache_and_all_caches_blocks_of_one_size() -> None:
    ops = ops_of(torch.float32)
    with pytest.raises(AssertionError, match="a cache comes before a plan"):
        ops.plan_attention(torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.ones(1).int())
    ops.new_cache(n_layers=1, n_blocks=1, block_size=16, n_kv_heads=1, head_dim=16)
    with pytest.raises(AssertionError, match="other caches have blocks of 16"):
        ops.new_cache(n_layers=1, n_blocks=1, block_size=32, n_kv_heads=1, head_dim=16)
