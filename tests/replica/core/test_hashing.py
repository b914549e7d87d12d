"""Block hashes mean equal prefixes under an equal scope, however they were computed."""

from dataclasses import replace

from bakehouse_replica.core.hashing import HashScope, block_hashes, choice_seed, next_block_hash, root_hash

SCOPE = HashScope(block_size=4, model_digest="model", key=b"key")
TOKENS = list(range(14))


def test_only_full_blocks_are_hashed_and_each_depends_on_all_before_it() -> None:
    hashes = block_hashes(TOKENS, SCOPE)
    assert len(hashes) == 3
    assert block_hashes([99, *TOKENS[1:]], SCOPE)[2] != hashes[2]
    assert block_hashes([*TOKENS[:8], 99, *TOKENS[9:]], SCOPE)[:2] == hashes[:2]


def test_hashing_block_by_block_gives_the_same_hashes() -> None:
    parent, hashes = root_hash(SCOPE), []
    for begin in range(0, 12, 4):
        parent = next_block_hash(parent, TOKENS[begin : begin + 4], SCOPE.key)
        hashes.append(parent)
    assert hashes == block_hashes(TOKENS, SCOPE)


def test_c36_an_adapter_named_like_a_salt_shares_nothing_with_it() -> None:
    scopes = [
        SCOPE,
        replace(SCOPE, adapter="X"),
        replace(SCOPE, salt="X"),
        replace(SCOPE, adapter="X", salt="X"),
        replace(SCOPE, model_digest="X"),
        replace(SCOPE, key=b"X"),
        replace(SCOPE, block_size=2),
    ]
    assert len({block_hashes(TOKENS, scope)[0] for scope in scopes}) == len(scopes)


def test_choice_seeds_are_distinct_and_the_first_is_the_request_s_own() -> None:
    seeds = [choice_seed(7, choice) for choice in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
