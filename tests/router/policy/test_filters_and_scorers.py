"""One table per filter and per scorer."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.hashing import block_hashes
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad, Request
from bakehouse_router.policy.filters import BOUND_FLOOR, is_hot, no_slot, not_serving
from bakehouse_router.policy.scorers import (
    SEQUENCE_TOKENS,
    sequence_tokens,
    shortage_tokens,
    uncached_tokens,
    waiting_tokens,
)
from bakehouse_router.policy.views import DIGEST_BYTES, OwnLoad, ReplicaView

CARD = ReplicaCard(
    replica_id="a",
    model_name="m",
    model_digest="d",
    hash_key=b"k",
    block_size=4,
    n_blocks=100,
    vocabulary_size=50,
    max_model_len=400,
    max_sequences=8,
)
LOAD = ReplicaLoad(
    version=1,
    n_running=0,
    n_waiting=0,
    waiting_tokens=0,
    n_free_blocks=100,
    n_cached_blocks=0,
    n_held_blocks=0,
    step_time_s=0.0,
)


def holding(n_sequences: int) -> ReplicaView:
    return ReplicaView(card=CARD, load=LOAD, own=OwnLoad(n_sequences=n_sequences))


def request(n_prompt: int, *, prior: int = 0) -> Request:
    return Request(
        request_id="r",
        prompt_ids=tuple(range(n_prompt)),
        prior_output=tuple(range(prior)),
        params=SamplingParams(seed=1),
    )


@pytest.mark.parametrize(
    ("problem", "reason"), [(None, None), ("engine has died", "does not serve: engine has died")]
)
def test_a_replica_with_a_problem_does_not_serve(problem: str | None, reason: str | None) -> None:
    assert not_serving(ReplicaView(card=CARD, problem=problem)) == reason


@pytest.mark.parametrize(
    ("n_sequences", "reason"),
    [(0, None), (7, None), (8, "holds 8 sequences of at most 8"), (20, "holds 20 sequences of at most 8")],
)
def test_a_replica_without_a_free_slot_says_so(n_sequences: int, reason: str | None) -> None:
    assert no_slot(holding(n_sequences)) == reason


@pytest.mark.parametrize(
    ("others", "n_sequences", "n_new", "hot"),
    [
        pytest.param((), 1000, 1, False, id="alone it is never hot"),
        pytest.param((0, 0, 0), BOUND_FLOOR - 1, 1, False, id="few in flight: the floor holds"),
        pytest.param((0, 0, 0), BOUND_FLOOR, 1, True, id="one above the floor while others idle"),
        pytest.param((20, 20, 20), 20, 1, False, id="even"),
        pytest.param((20, 20, 20), 40, 1, True, id="twice the others"),
        pytest.param((40, 0, 0), 9, 1, False, id="a hot neighbour makes nobody else hot"),
        pytest.param((0, 0, 0), 0, 16, False, id="one request of many choices must go somewhere"),
    ],
)
def test_only_a_candidate_above_its_bounded_share_is_hot(
    others: tuple[int, ...], n_sequences: int, n_new: int, hot: bool
) -> None:
    even_share = (sum(others) + n_sequences + n_new) / (len(others) + 1)

    assert (is_hot(holding(n_sequences), even_share, n_new) is not None) == hot


@pytest.mark.parametrize(
    ("n_prompt", "prior", "n_cached_blocks", "expected"),
    [
        pytest.param(10, 0, 0, 10, id="nothing cached"),
        pytest.param(10, 0, 1, 6, id="one block of four"),
        pytest.param(10, 0, 2, 2, id="all full blocks"),
        pytest.param(8, 0, 2, 1, id="all of it cached: the last token is computed all the same"),
        pytest.param(3, 0, 0, 3, id="shorter than a block"),
        pytest.param(8, 6, 0, 14, id="replayed output is computed, too"),
        pytest.param(8, 6, 3, 2, id="and cached as well"),
    ],
)
def test_uncached_tokens_are_what_is_left_after_the_cached_prefix(
    n_prompt: int, prior: int, n_cached_blocks: int, expected: int
) -> None:
    asked = request(n_prompt, prior=prior)
    hashes = block_hashes(asked.prompt_ids + asked.prior_output, ReplicaView(card=CARD).scope(""))
    digests = tuple(block_hash[:DIGEST_BYTES] for block_hash in hashes)
    view = ReplicaView(card=CARD, resident=frozenset(digests[:n_cached_blocks]))

    assert uncached_tokens(asked, view, digests) == expected


@pytest.mark.parametrize(("reported", "expected"), [(0, 0), (700, 700)])
def test_waiting_tokens_are_other_requests_prefill(reported: int, expected: int) -> None:
    assert waiting_tokens(ReplicaView(card=CARD, load=replace(LOAD, waiting_tokens=reported))) == expected


@pytest.mark.parametrize(
    ("n_sequences", "n_uncached", "expected"),
    [
        pytest.param(0, 6000, 0, id="nobody to delay"),
        pytest.param(1, 1, 33, id="one that decodes beside"),
        pytest.param(3, 1200, 3 * 1232, id="each by the prompt and by the answer"),
    ],
)
def test_each_sequence_is_delayed_by_what_the_request_brings(
    n_sequences: int, n_uncached: int, expected: int
) -> None:
    assert SEQUENCE_TOKENS == 32
    assert sequence_tokens(holding(n_sequences), n_uncached) == expected


@pytest.mark.parametrize(
    ("n_free", "n_cached", "n_uncached", "expected"),
    [
        pytest.param(10, 0, 40, 0, id="fits exactly"),
        pytest.param(10, 0, 41, 1, id="one token too many"),
        pytest.param(0, 10, 40, 0, id="cached blocks can be evicted"),
        pytest.param(0, 0, 40, 40, id="all held"),
    ],
)
def test_a_shortage_is_what_finds_no_block(n_free: int, n_cached: int, n_uncached: int, expected: int) -> None:
    view = ReplicaView(card=CARD, load=replace(LOAD, n_free_blocks=n_free, n_cached_blocks=n_cached))

    assert shortage_tokens(view, n_uncached) == expected


def test_before_the_first_report_no_shortage_is_assumed() -> None:
    assert shortage_tokens(ReplicaView(card=CARD), 10_000) == 0
