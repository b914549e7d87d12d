"""Penalties and biases: the bits of their definition."""

import math

import torch
from bakehouse_kernels.layout import LogitChanges
from bakehouse_kernels.reference_draw import adjust as adjust_by_definition
from bakehouse_kernels.triton.penalties import adjust


def random_changes(n_rows: int, n_vocabulary: int, n_places: int, generator: torch.Generator) -> LogitChanges:
    places = torch.randperm(n_rows * n_vocabulary, generator=generator)[:n_places]
    count = torch.randint(0, 4, (n_places,), generator=generator, dtype=torch.int32)
    bias = torch.randn(n_places, generator=generator) * (torch.rand(n_places, generator=generator) < 0.5)
    bias[::5] = -math.inf
    return LogitChanges(
        repetition_R=torch.rand(n_rows, generator=generator) + 0.5,
        presence_R=torch.rand(n_rows, generator=generator) - 0.5,
        frequency_R=torch.rand(n_rows, generator=generator) - 0.5,
        row_C=(places // n_vocabulary).int(),
        id_C=(places % n_vocabulary).int(),
        is_seen_C=(count > 0) | (torch.rand(n_places, generator=generator) < 0.5),
        count_C=count,
        bias_C=bias,
    )


def test_changes_have_the_bits_of_their_definition(generator: torch.Generator) -> None:
    for n_places in (0, 1, 7, 8, 9, 60):
        changes = random_changes(5, 31, n_places, generator)
        logits = torch.randn(5, 31, generator=generator) * 4
        expected = logits.clone()
        adjust_by_definition(expected, changes)
        adjust(logits, changes)
        assert logits.equal(expected)


def test_rows_may_lie_apart(generator: torch.Generator) -> None:
    wide = torch.zeros(3, 20)
    wide[:, 4:15] = torch.randn(3, 11, generator=generator)
    expected = wide.clone()
    changes = random_changes(3, 11, 12, generator)
    adjust_by_definition(expected[:, 4:15], changes)
    adjust(wide[:, 4:15], changes)
    assert wide.equal(expected)
