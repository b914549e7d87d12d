"""The oracle itself, against torch's own operations on a cache without gaps."""

import pytest
import torch
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import ReferenceOps
from torch.nn import functional

from tests.kernels.conftest import Compare


@pytest.mark.parametrize(("n_queries", "context_len"), [(1, 1), (1, 24), (5, 24), (24, 24)])
def test_attention_is_torchs_over_the_gathered_context(
    reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator, n_queries: int, context_len: int
) -> None:
    q = torch.randn(n_queries, 6, 16, generator=generator)
    cache = KVCache(
        key=(torch.randn(3, 8, 2, 16, generator=generator),),
        value=(torch.randn(3, 8, 2, 16, generator=generator),),
    )
    actual = reference_ops.paged_attention(
        q,
        cache,
        0,
        torch.tensor([[2, 0, 1]], dtype=torch.int32),
        torch.tensor([0, n_queries], dtype=torch.int32),
        torch.tensor([context_len], dtype=torch.int32),
        scale=0.3,
    )
    k, v = (pool[0][[2, 0, 1]].view(24, 2, 16)[:context_len].transpose(0, 1) for pool in (cache.key, cache.value))
    visible = torch.ones(n_queries, context_len, dtype=torch.bool).tril(context_len - n_queries)
    expected = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, attn_mask=visible, scale=0.3, enable_gqa=True
    )
    compare(actual, expected.transpose(0, 1))


def test_norm_and_activation_are_torchs(
    reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator
) -> None:
    x, weight = torch.randn(4, 12, generator=generator), torch.randn(12, generator=generator)
    compare(reference_ops.rms_norm(x, weight, 1e-5), functional.rms_norm(x, (12,), weight, 1e-5))
    compare(reference_ops.silu_mul(x), functional.silu(x[:, :6]) * x[:, 6:])


def test_rope_turns_each_pair_by_its_angle(
    reference_ops: ReferenceOps, compare: Compare, generator: torch.Generator
) -> None:
    x, angle = torch.randn(4, 2, 8, generator=generator), torch.randn(4, 4, generator=generator)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    turned = pairs * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    actual = reference_ops.rope(x, angle.cos().repeat(1, 2), angle.sin().repeat(1, 2))
    compare(actual, torch.cat((turned.real, turned.imag), dim=-1))


def test_bfloat16_comes_back_as_bfloat16_rounded_once(
    reference_ops: ReferenceOps, generator: torch.Generator
) -> None:
    x = torch.randn(4, 12, generator=generator).bfloat16()
    weight = torch.randn(12, generator=generator).bfloat16()
    expected = reference_ops.rms_norm(x.float(), weight.float(), 1e-5).bfloat16()
    assert reference_ops.rms_norm(x, weight, 1e-5).equal(expected)
