"""The block pool's rules, each by example, then all of them under random use."""

from collections.abc import Sequence

import pytest
from bakehouse_replica.core.blocks import BlockPool
from bakehouse_replica.core.types import BlockCopy
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 2
ROOT = b"root"


def make_pool(n_blocks: int = 6) -> BlockPool:
    return BlockPool(n_blocks=n_blocks, block_size=SIZE, hash_key=b"key")


def hash_chain(pool: BlockPool, token_ids: Sequence[int]) -> list[bytes]:
    hashes: list[bytes] = []
    for begin in range(0, len(token_ids) - SIZE + 1, SIZE):
        hashes.append(pool.next_hash(hashes[-1] if hashes else ROOT, token_ids[begin : begin + SIZE]))
    return hashes


def compute(pool: BlockPool, token_ids: Sequence[int]) -> list[int]:
    """A table whose blocks were all computed and registered, as after the prefill of `token_ids`."""
    hashes = hash_chain(pool, token_ids)
    table = pool.match(hashes, token_ids)
    pool.share(table)
    table += [pool.allocate() for _ in range(len(hashes) - len(table))]
    for index in range(len(pool.match(hashes, token_ids)), len(hashes)):
        assert pool.register(table, index, hashes[index], token_ids[index * SIZE : (index + 1) * SIZE])
    return table


def find(pool: BlockPool, token_ids: Sequence[int]) -> list[int]:
    return pool.match(hash_chain(pool, token_ids), token_ids)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.n_free, pool.n_cached, pool.n_held


def test_a_released_block_is_cached_where_it_is_registered_and_free_otherwise() -> None:
    pool = make_pool()
    table = [*compute(pool, [1, 2]), pool.allocate()]
    assert counts(pool) == (4, 0, 2)
    pool.release(table)
    assert counts(pool) == (5, 1, 0)
    pool.check([])


def test_cached_blocks_are_found_and_become_held_again() -> None:
    pool = make_pool()
    table = compute(pool, [1, 2, 3, 4])
    pool.release(table)
    assert find(pool, [1, 2, 3, 4, 5]) == table
    pool.share(table)
    assert counts(pool) == (4, 0, 2)
    pool.check([table])


def test_a_match_ends_where_the_tokens_differ_and_changes_nothing() -> None:
    pool = make_pool()
    table = compute(pool, [1, 2, 3, 4])
    before = counts(pool), pool.resident_hashes(9)
    assert find(pool, [1, 2, 9, 9]) == table[:1]
    assert find(pool, [9, 9, 3, 4]) == []
    assert (counts(pool), pool.resident_hashes(9)) == before


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = make_pool(3)
    pool.release(compute(pool, [1, 2]))
    held = [pool.allocate(), pool.allocate()]
    assert find(pool, [1, 2]) != []
    held.append(pool.allocate())
    assert find(pool, [1, 2]) == []
    pool.check([held])


def test_the_longest_unused_chain_is_evicted_first_from_its_deepest_block_on() -> None:
    pool = make_pool(4)
    pool.release(compute(pool, [1, 2, 3, 4]))
    pool.release(compute(pool, [5, 6, 7, 8]))
    used_again = find(pool, [1, 2, 3, 4])
    pool.share(used_again)
    pool.release(used_again)
    evicted = []
    for _ in range(4):
        before = {name: find(pool, tokens) for name, tokens in (("old", [5, 6, 7, 8]), ("new", [1, 2, 3, 4]))}
        pool.allocate()
        after = {"old": find(pool, [5, 6, 7, 8]), "new": find(pool, [1, 2, 3, 4])}
        evicted += [(name, len(after[name])) for name in before if before[name] != after[name]]
    assert evicted == [("old", 1), ("old", 0), ("new", 1), ("new", 0)]


def test_the_first_write_to_a_shared_block_copies_it_and_the_last_holder_writes_in_place() -> None:
    pool = make_pool()
    first = [pool.allocate()]
    second, third = list(first), list(first)
    pool.share(second)
    pool.share(third)
    copies = [pool.writable(table, 0) for table in (first, second, third)]
    assert copies == [
        BlockCopy(source=third[0], target=first[0]),
        BlockCopy(source=third[0], target=second[0]),
        None,
    ]
    assert len({first[0], second[0], third[0]}) == 3
    pool.check([first, second, third])


def test_a_table_takes_the_registered_twin_of_a_block_it_computed_itself() -> None:
    pool = make_pool()
    first = compute(pool, [1, 2])
    second = [pool.allocate(), pool.allocate()]
    hashes = hash_chain(pool, [1, 2, 3, 4])
    assert pool.register(second, 0, hashes[0], [1, 2])
    assert second[0] == first[0]
    assert pool.register(second, 1, hashes[1], [3, 4]), "its parent is the twin, which is registered"
    assert counts(pool) == (4, 0, 2)
    pool.check([first, second])


def test_c38_a_colliding_hash_costs_a_hit_and_never_gives_foreign_content() -> None:
    pool = make_pool()
    first, second, third = [pool.allocate()], [pool.allocate()], [pool.allocate(), pool.allocate()]
    assert pool.register(first, 0, b"same", [1, 2])
    assert not pool.register(second, 0, b"same", [3, 4])
    assert pool.match([b"same"], [3, 4]) == []
    assert pool.match([b"same"], [1, 2]) == first
    # Equal tokens behind another prefix are other content, whatever the hash says.
    assert pool.register(third, 0, b"other", [5, 6])
    assert not pool.register(third, 1, b"same", [1, 2])
    assert pool.match([b"other", b"same"], [5, 6, 1, 2]) == third[:1]
    pool.check([first, second, third])


def test_resident_hashes_come_most_recently_used_first_cut_and_bounded() -> None:
    pool = make_pool()
    pool.release(compute(pool, [1, 2, 3, 4]))
    pool.release(compute(pool, [5, 6]))
    old, new = hash_chain(pool, [1, 2, 3, 4]), hash_chain(pool, [5, 6])
    assert pool.resident_hashes(9) == (new[0][:8], old[0][:8], old[1][:8])
    assert pool.resident_hashes(2) == (new[0][:8], old[0][:8])


def test_illegal_calls_raise_and_change_nothing() -> None:
    pool = make_pool(2)
    table = compute(pool, [1, 2, 3, 4])
    hashes = hash_chain(pool, [1, 2, 3, 4])
    with pytest.raises(AssertionError, match="free or cached block"):
        pool.allocate()
    with pytest.raises(AssertionError, match="would be overwritten"):
        pool.writable(table, 1)
    with pytest.raises(AssertionError, match="registered twice"):
        pool.register(table, 1, hashes[1], [3, 4])
    pool.check([table])
    pool.release(table)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(table)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.register(table, 1, hashes[1], [3, 4])
    assert counts(pool) == (0, 2, 0)
    pool.check([])


def test_a_block_is_registered_only_behind_a_registered_parent() -> None:
    pool = make_pool()
    table = [pool.allocate(), pool.allocate()]
    with pytest.raises(AssertionError, match="parent"):
        pool.register(table, 1, b"hash", [3, 4])
    pool.check([table])


def test_the_audit_sees_a_hold_that_no_table_has() -> None:
    pool = make_pool()
    table = [pool.allocate()]
    pool.share(table)
    with pytest.raises(AssertionError, match="counts 2 holders; 1 tables hold it"):
        pool.check([table])


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=10)


@settings(max_examples=200)
@given(st.lists(st.tuples(PROMPTS, st.integers(0, 5)), max_size=40))
def test_the_rules_hold_under_random_use(uses: list[tuple[list[int], int]]) -> None:
    pool = make_pool(12)
    tables: list[list[int]] = []
    for prompt, choice in uses:
        while tables and pool.n_available < len(prompt) // SIZE:
            pool.release(tables.pop(choice % len(tables)))
        expected = find(pool, prompt)
        table = compute(pool, prompt)
        assert table[: len(expected)] == expected
        assert find(pool, prompt) == table
        tables.append(table)
        pool.check(tables)
        if choice == 0:
            pool.release(tables.pop(0))
            pool.check(tables)
    for table in tables:
        pool.release(table)
    pool.check([])
    assert pool.n_held == 0
