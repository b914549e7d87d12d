"""Decode rows that share blocks: the shared splits are read together, and nobody's bits tell."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from bakehouse_kernels.triton.attention_plan import N_GROUPS, TritonPlan

from tests.kernels.triton.attention_batches import Batch, make_batch
from tests.kernels.triton.conftest import Close

# Ten rows share 5 blocks of 16: two splits of 32 tokens, and a part of the third.
SHARING = (*(((1, 86),) * 7), (1, 80), (1, 81), (1, 110))


def n_groups(plan: TritonPlan) -> int:
    return int(plan.array[N_GROUPS])


def assert_same_bits_alone(together: Batch, result: torch.Tensor, chunks: Iterable[int]) -> None:
    for s in chunks:
        start, end = together.query_start_S1[s : s + 2].tolist()
        assert together.only(s).attend().equal(result[start:end]), f"chunk {s}"


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "window", "softcap"),
    [
        ((3, 1), 64, torch.float32, None, None),
        ((4, 2), 80, torch.bfloat16, None, 2.0),
        ((8, 1), 16, torch.float32, 50, None),
        ((16, 1), 16, torch.bfloat16, 12, None),
        ((1, 1), 128, torch.float32, 82, 0.5),
    ],
)
def test_rows_that_share_blocks_get_what_their_definition_says_and_what_they_get_alone(
    close: Close,
    generator: torch.Generator,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    batch = make_batch(
        generator,
        SHARING,
        heads=heads,
        head_dim=head_dim,
        n_shared_blocks=5,
        dtype=dtype,
        window=window,
        softcap=softcap,
        split_tokens=32,
    )
    assert n_groups(batch.plan()) == 4  # 8 and 2 rows, in each of two splits
    result = batch.attend()
    close(result, batch.expected())
    assert_same_bits_alone(batch, result, (6, 7, 8, 9))


def test_forks_that_share_all_they_see_get_what_they_get_alone(close: Close, generator: torch.Generator) -> None:
    batch = make_batch(generator, ((1, 32),) * 9, n_shared_blocks=2, split_tokens=32)
    more = make_batch(generator, ((1, 32),) * 16, n_shared_blocks=2, split_tokens=32)
    assert (n_groups(batch.plan()), n_groups(more.plan())) == (0, 2)
    for each in (batch, more):
        result = each.attend()
        close(result, each.expected())
        assert_same_bits_alone(each, result, (0, 8))


def test_sharers_among_others_get_what_they_get_alone(close: Close, generator: torch.Generator) -> None:
    chunks = ((1, 60), (12, 90), (1, 30), *SHARING, (0, 80), (2, 90))
    batch = make_batch(generator, chunks, n_shared_blocks=5, split_tokens=32)
    assert n_groups(batch.plan()) > 0
    result = batch.attend()
    close(result, batch.expected())
    assert_same_bits_alone(batch, result, range(len(chunks)))


def test_a_row_has_the_same_bits_whoever_it_shares_with(generator: torch.Generator) -> None:
    batch = make_batch(generator, SHARING, n_shared_blocks=5, split_tokens=32)
    result = batch.attend()
    for keep in (slice(0, 10, 1), slice(1, 10, 1), slice(9, None)):
        n_rows = len(batch.context_len_S[keep])
        fewer = replace(
            batch,
            q_TND=batch.q_TND[keep],
            block_table_SB=batch.block_table_SB[keep],
            query_start_S1=torch.arange(n_rows + 1, dtype=torch.int32),
            context_len_S=batch.context_len_S[keep],
        )
        assert fewer.attend().equal(result[keep]), f"rows {keep}"


@pytest.mark.timeout(900)  # twelve compilations, unless those of the tables came before
def test_compiled_kernels_all_sum_a_split_alike(compiled_environment: Mapping[str, str]) -> None:
    # Which numbers a thread adds up follows from the layout of the products; that of wgmma, which takes 64 rows,
    # is another.
    program = [sys.executable, "-m", "tests.kernels.triton.compiled_layouts"]
    answer = subprocess.run(
        program, env=compiled_environment, check=True, capture_output=True, text=True, timeout=800
    )
    layouts = json.loads(answer.stdout)
    assert len(layouts) == 4
    for case, (alone, shared, ragged) in layouts.items():
        assert len(alone) == 1, f"{case}: {alone}"
        assert alone == shared, case
        assert alone[0] in ragged, f"{case}: {alone[0]} is not among {ragged}"
