"""Plans of the attention kernels: each key is taken once for a row, and a recorded plan is refilled in place."""

from dataclasses import replace

import pytest
import torch
from bakehouse_kernels.triton.attention_plan import (
    GROUP_FIELDS,
    GROUPS_AT,
    HEADER,
    ITEM_FIELDS,
    ITEMS_AT,
    MEMBER_FIELDS,
    MEMBERS_AT,
    N_GROUPS,
    N_ITEMS,
    SHARER_FIELDS,
    SHARERS_AT,
    TILE_FIELDS,
    TritonPlan,
)

from tests.kernels.triton.attention_batches import Batch, make_batch
from tests.kernels.triton.conftest import Close


def records(plan: TritonPlan, begin: int, n: int, n_fields: int) -> list[list[int]]:
    return plan.array[begin : begin + n * n_fields].view(n, n_fields).tolist()


def tiles(plan: TritonPlan) -> list[list[int]]:
    return records(plan, HEADER, plan.n_tiles, TILE_FIELDS)


def members(plan: TritonPlan) -> list[list[int]]:
    return records(plan, int(plan.array[MEMBERS_AT]), plan.n_members, MEMBER_FIELDS)


def items(plan: TritonPlan) -> list[list[int]]:
    return records(plan, int(plan.array[ITEMS_AT]), int(plan.array[N_ITEMS]), ITEM_FIELDS)


def groups(plan: TritonPlan) -> list[tuple[int, list[int], int]]:
    """Split, members and where the blocks begin, of each group."""
    found = []
    for split, first, n_sharers, blocks in records(
        plan, int(plan.array[GROUPS_AT]), int(plan.array[N_GROUPS]), GROUP_FIELDS
    ):
        at = int(plan.array[SHARERS_AT]) + first * SHARER_FIELDS
        sharers = records(plan, at, n_sharers, SHARER_FIELDS)
        assert all([row, position] == members(plan)[member] for member, row, position in sharers)
        found.append((split, [member for member, _, _ in sharers], blocks))
    return found


def blocks_at(plan: TritonPlan, at: int, n_blocks: int) -> list[int]:
    return plan.array[at : at + n_blocks].tolist()


def test_chunks_of_several_rows_go_in_strips_the_latest_positions_first(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((17, 20), (1, 5), (0, 9), (2, 12)))
    plan = batch.plan()
    assert [tile[:4] for tile in tiles(plan)] == [
        [16, 16, 1, 19],  # first query, row, rows from there on, position
        [8, 8, 9, 11],
        [0, 18, 2, 10],
        [0, 0, 17, 3],
    ]
    for tile, s in zip(tiles(plan), (0, 0, 3, 0), strict=True):
        assert blocks_at(plan, tile[4], 1) == [batch.block_table_SB[s, 0]]
    assert members(plan) == [[17, 4]]  # row, position


def test_chunks_of_one_row_go_split_by_split_the_longest_first(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((1, 70), (3, 3), (1, 129), (1, 64)), split_tokens=64)
    plan = batch.plan()
    assert members(plan) == [[0, 69], [4, 128], [5, 63]]
    assert [item[:4] for item in items(plan)] == [
        [0, 0, 0, 69],  # member, split, row, position
        [1, 0, 4, 128],
        [1, 1, 4, 128],
        [2, 0, 5, 63],
        [0, 1, 0, 69],
        [1, 2, 4, 128],
    ]
    for item in items(plan):
        s = (0, 2, 3)[item[0]]
        assert blocks_at(plan, item[4], 4) == batch.block_table_SB[s, :4].tolist()


def test_equal_leading_blocks_make_groups_of_whole_splits(generator: torch.Generator) -> None:
    # Five rows share 11 blocks of 16: two splits of 64 tokens, of which one row has but the first.
    batch = make_batch(generator, (*(((1, 200),) * 4), (1, 100), (1, 30)), n_shared_blocks=11, split_tokens=64)
    batch.block_table_SB[5] = batch.block_table_SB[5].flip(0)  # the last row shares nothing
    batch.block_table_SB[5, :2] = torch.tensor([1000, 1001])
    plan = batch.plan()
    assert {(split, tuple(sorted(sharers))) for split, sharers, _ in groups(plan)} == set()
    # Seven reads saved: with one row more there are nine.
    more = make_batch(generator, (*(((1, 200),) * 5), (1, 100), (1, 30)), n_shared_blocks=11, split_tokens=64)
    plan = more.plan()
    found = {(split, tuple(sorted(sharers))) for split, sharers, _ in groups(plan)}
    assert found == {(0, (0, 1, 2, 3, 4, 5)), (1, (0, 1, 2, 3, 4))}
    assert [item[:2] for item in items(plan) if item[0] == 5] == [[5, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_every_split_of_every_row_is_taken_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n_rows, n_shared = torch.randint(0, 40, (2,), generator=generator).tolist()
    lengths = torch.randint(1, 200, (n_rows,), generator=generator).tolist()
    batch = make_batch(
        generator,
        tuple((1, length) for length in lengths),
        heads=(1, 1),
        n_shared_blocks=min(n_shared, 9),
        split_tokens=32,
    )
    plan = batch.plan()
    taken = [(member, split) for member, split, *_ in items(plan)]
    for split, sharers, at in groups(plan):
        for member in sharers:
            taken.append((member, split))
            shared = batch.block_table_SB[member, : 2 * split + 2]
            assert blocks_at(plan, at, len(shared)) == shared.tolist(), f"member {member}, split {split}"
            assert lengths[member] >= 32 * (split + 1), "a shared split is seen whole"
    expected = [(member, split) for member, length in enumerate(lengths) for split in range(-(-length // 32))]
    assert sorted(taken) == expected


def test_splits_that_do_not_divide_into_blocks_are_not_shared(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((1, 100),) * 12, block_size=24, n_shared_blocks=4, split_tokens=64)
    assert not groups(batch.plan())


def test_the_tensors_may_change_once_the_plan_is_made(close: Close, generator: torch.Generator) -> None:
    batch = make_batch(generator, ((1, 70), (3, 9)))
    expected = batch.expected()
    plan = batch.plan()
    for index in (batch.block_table_SB, batch.query_start_S1, batch.context_len_S):
        index.fill_(2**31 - 1)
    close(batch.attend(plan), expected)


def launches(plan: TritonPlan) -> tuple[int, ...]:
    return (plan.n_tiles, plan.n_members, plan.max_splits, plan.max_groups, plan.array.data_ptr())


def recorded(batch: Batch, width: int) -> TritonPlan:
    """As a recording is made: before there is anything to attend to, with a table of this width."""
    n_rows = len(batch.context_len_S)
    return replace(
        batch,
        block_table_SB=torch.zeros((n_rows, width), dtype=torch.int32),
        context_len_S=torch.ones(n_rows, dtype=torch.int32),
    ).plan()


def test_a_recorded_plan_is_refilled_where_it_stands_and_launched_alike(
    close: Close, generator: torch.Generator
) -> None:
    steps = [
        make_batch(generator, ((1, 70),) * 10, heads=(1, 1), n_shared_blocks=4, split_tokens=32),
        make_batch(generator, ((1, 1), (1, 65), *(((1, 33),) * 8)), heads=(1, 1), split_tokens=32),
        make_batch(generator, ((1, 16),) * 10, heads=(1, 1), split_tokens=32),
    ]
    plan = recorded(steps[0], width=8)
    before = launches(plan)
    assert plan.max_groups > 0
    assert plan.max_splits == 4
    for step in steps:
        assert step.plan(into=plan) is plan
        assert launches(plan) == before
        result = step.attend(plan)
        close(result, step.expected())
        assert result.equal(step.attend())


def test_what_launches_depend_on_follows_from_rows_and_width_alone(generator: torch.Generator) -> None:
    for n_rows, width in ((1, 1), (1, 16), (3, 5), (10, 16)):
        batch = make_batch(generator, ((1, 16 * width),) * n_rows, n_shared_blocks=width, split_tokens=64)
        batch = replace(batch, block_table_SB=batch.block_table_SB[:, :width])
        assert launches(batch.plan())[:-1] == launches(recorded(batch, width))[:-1]


def test_only_plans_of_as_many_single_rows_are_refilled(generator: torch.Generator) -> None:
    two, three = (make_batch(generator, ((1, 20),) * n, split_tokens=64) for n in (2, 3))
    chunk = make_batch(generator, ((2, 20),), split_tokens=64)
    wide = make_batch(generator, ((1, 200), (1, 3)), split_tokens=64)
    for batch, plan in ((three, two.plan()), (chunk, two.plan()), (two, chunk.plan())):
        before = plan.array.clone()
        with pytest.raises(AssertionError, match="chunks of one row, as many"):
            batch.plan(into=plan)
        assert plan.array.equal(before)
    with pytest.raises(AssertionError, match="a table at least as wide"):
        wide.plan(into=two.plan())


def test_rows_beyond_their_context_are_a_fault(generator: torch.Generator) -> None:
    batch = make_batch(generator, ((3, 3),))
    with pytest.raises(AssertionError, match="rows are positions of their context"):
        replace(batch, context_len_S=batch.context_len_S - 1).plan()
