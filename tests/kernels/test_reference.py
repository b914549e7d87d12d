"""The oracle itself, against torch's own operations on a cache without gaps."""

import pytest
import torch
from bakehouse_kernels.layout import KVCache
from bakehouse_kernels.reference import QuantisedReferenceOps, ReferenceOps, rotated
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
        block_size=8,
    )
    plan = reference_ops.plan_attention(
        torch.tensor([[2, 0, 1]], dtype=torch.int32),
        torch.tensor([0, n_queries], dtype=torch.int32),
        torch.tensor([context_len], dtype=torch.int32),
    )
    actual = reference_ops.paged_attention(q, cache, 0, plan, scale=0.3)
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
    gated = reference_ops.gated_linear(x, reference_ops.pack_gated(torch.eye(12)))
    compare(gated, functional.silu(x[:, :6]) * x[:, 6:])


def test_rotation_turns_each_pair_by_its_angle(compare: Compare, generator: torch.Generator) -> None:
    x, angle = torch.randn(4, 2, 8, generator=generator), torch.randn(4, 4, generator=generator)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    turned = pairs * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    actual = rotated(x, angle.cos().repeat(1, 2), angle.sin().repeat(1, 2))
    compare(actual, torch.cat((turned.real, turned.imag), dim=-1))


def test_bfloat16_comes_back_as_bfloat16_rounded_once(
    reference_ops: ReferenceOps, generator: torch.Generator
) -> None:
    x = torch.randn(4, 12, generator=generator).bfloat16()
    weight = torch.randn(12, generator=generator).bfloat16()
    expected = reference_ops.rms_norm(x.float(), weight.float(), 1e-5).bfloat16()
    assert reference_ops.rms_norm(x, weight, 1e-5).equal(expected)


def test_eight_bit_products_are_those_of_the_rounded_numbers() -> None:
    ops = QuantisedReferenceOps()
    # Columns of scale 1 and 0.5; rows of scale 1, 2 and 0. Halves go to the even neighbour.
    weight = torch.tensor([[127.0, 63.5], [2.5, 1.75], [0.0, 0.0]])
    x = torch.tensor([[127.0, 0.5, 9.0], [254.0, -3.0, 0.0], [0.0, 0.0, 0.0]])
    integers_x, integers_w = [[127, 0, 9], [127, -2, 0], [0, 0, 0]], [[127, 127], [2, 4], [0, 0]]
    wanted = torch.tensor(integers_x) @ torch.tensor(integers_w) * torch.tensor([[1.0], [2.0], [0.0]])
    assert ops.linear(x, ops.pack(weight)).equal(wanted * torch.tensor([1.0, 0.5]))


def test_eight_bit_products_are_within_half_a_step_of_the_product(generator: torch.Generator) -> None:
    ops = QuantisedReferenceOps()
    x, weight = torch.randn(5, 200, generator=generator), torch.randn(200, 30, generator=generator)
    step_x, step_w = x.abs().amax(1, keepdim=True) / 127, weight.abs().amax(0) / 127
    # Each factor is off by half its step at most.
    worst = (x.abs().sum(1, keepdim=True) * step_w + weight.abs().sum(0) * step_x + 200 * step_x * step_w / 2) / 2
    assert ((ops.linear(x, ops.pack(weight)) - x @ weight).abs() <= worst).all()
