"""Routing over time: the policy and the replica table together, as the request router uses them."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from bakehouse_replica.core.hashing import block_hashes
from bakehouse_replica.core.metric_table import ROUTING_REASONS
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad, Request
from bakehouse_router.policy.pick import Choice, choose
from bakehouse_router.policy.views import DIGEST_BYTES, OwnLoad, ReplicaView
from bakehouse_router.replicas import ACCEPT_WITHIN_S, REPORT_AGE_S, ReplicaTable

CARD = ReplicaCard(
    replica_id="",
    model_name="m",
    model_digest="d",
    hash_key=b"k",
    block_size=16,
    n_blocks=1000,
    vocabulary_size=50_000,
    max_model_len=4096,
    max_sequences=64,
)
IDLE = ReplicaLoad(
    version=1,
    n_running=0,
    n_waiting=0,
    waiting_tokens=0,
    n_free_blocks=1000,
    n_cached_blocks=0,
    n_held_blocks=0,
    step_time_s=0.0,
)
PREFIX = tuple(range(600))


def request(prompt: tuple[int, ...], *, salt: str = "", n: int = 1) -> Request:
    return Request(request_id="r", prompt_ids=prompt, params=SamplingParams(seed=1, n=n), cache_salt=salt)


def unrelated(index: int, n_tokens: int = 100) -> Request:
    return request(tuple(10_000 + index * n_tokens + offset for offset in range(n_tokens)))


class Fleet:
    """A table of replicas and the router around it, with time in hand."""

    def __init__(self, *names: str) -> None:
        self.table = ReplicaTable()
        self.random = Random(7)
        self.now = 100.0
        for name in names:
            self.table.update(replace(CARD, replica_id=name), IDLE, None)

    def choose(self, asked: Request) -> Choice:
        return choose(asked, self.table.views(self.now), self.random)

    def send(self, key: str, asked: Request) -> str:
        best = self.choose(asked).ranked[0]
        self.table.charge(key, best, asked.params.n, self.now)
        self.table.accept(key, best.replica_id)
        return best.replica_id

    def answer(self, key: str, asked: Request) -> str:
        replica_id = self.send(key, asked)
        self.now += 0.2
        self.table.release(key, replica_id, self.now)
        return replica_id


def resident(asked: Request, card: ReplicaCard) -> tuple[bytes, ...]:
    scope = ReplicaView(card=card).scope(asked.cache_salt)
    return tuple(block_hash[:DIGEST_BYTES] for block_hash in block_hashes(asked.prompt_ids, scope))


def test_c37_a_prefix_cached_under_another_salt_counts_for_nothing() -> None:
    fleet = Fleet("a", "b")
    fleet.answer("1", request(PREFIX, salt="tenant-a"))

    same, other = fleet.choose(request(PREFIX, salt="tenant-a")), fleet.choose(request(PREFIX, salt="tenant-b"))

    assert min(candidate.n_uncached_tokens for candidate in same.ranked) < len(PREFIX)
    assert {candidate.n_uncached_tokens for candidate in other.ranked} == {len(PREFIX)}


@pytest.mark.parametrize("at_once", [True, False])
def test_c53_distinct_prompts_spread_over_warm_and_cold_replicas(at_once: bool) -> None:
    fleet = Fleet("warm-1", "warm-2", "warm-3", "cold")
    for index, name in enumerate(("warm-1", "warm-2", "warm-3")):
        cached = resident(unrelated(1000 + index, 4000), CARD)
        fleet.table.update(replace(CARD, replica_id=name), replace(IDLE, resident=cached), None)

    step = fleet.send if at_once else fleet.answer
    counts = Counter(step(str(index), unrelated(index)) for index in range(100))

    assert len(counts) == 4
    assert all(15 <= count <= 35 for count in counts.values()), counts


def test_c54_counters_return_to_zero_whatever_failed() -> None:
    fleet = Fleet("a", "b", "c", "d")
    sent = {str(index): fleet.send(str(index), unrelated(index)) for index in range(100)}
    counts = Counter(sent.values())

    for key, replica_id in sent.items():
        fleet.table.release(key, replica_id, fleet.now)
        fleet.table.release(key, replica_id, fleet.now)  # a failure may be told twice

    assert set(counts.values()) == {25}
    assert fleet.table.n_in_flight(fleet.now) == 0
    assert all(view.own.n_sequences == 0 for view in fleet.table.views(fleet.now))


def test_c55_a_saturated_replica_is_skipped_and_affinity_stays_on_for_the_others() -> None:
    fleet = Fleet("a", "b", "c", "d")
    asked = request(PREFIX)
    hot = replace(IDLE, version=2, n_running=64, n_waiting=10, resident=resident(asked, CARD))
    fleet.table.update(replace(CARD, replica_id="a"), hot, None)
    fleet.table.update(replace(CARD, replica_id="b"), replace(IDLE, resident=hot.resident), None)

    choice = fleet.choose(asked)

    assert choice.ranked[0].replica_id == "b"
    assert choice.ranked[-1].replica_id == "a"
    assert choice.ranked[-1].skipped == "holds 74 sequences of at most 64"
    assert [candidate.skipped for candidate in choice.ranked[:-1]] == [None] * 3


@pytest.mark.parametrize("prompts", ["equal", "distinct"])
def test_c56_a_burst_in_one_tick_spreads(prompts: str) -> None:
    fleet = Fleet("a", "b", "c", "d")

    counts = Counter(
        fleet.send(str(index), request(PREFIX) if prompts == "equal" else unrelated(index)) for index in range(40)
    )

    assert len(counts) == 4
    assert all(abs(count - 10) <= 3 for count in counts.values()), counts


def test_c57_prompts_of_one_prefix_stay_on_one_replica_and_unrelated_ones_spread() -> None:
    fleet = Fleet("a", "b", "c", "d")

    related = Counter(fleet.answer(f"p{index}", request((*PREFIX, 5000 + index))) for index in range(20))
    spread = Counter(fleet.answer(f"u{index}", unrelated(index)) for index in range(100))

    assert max(related.values()) >= 19
    assert all(10 <= count <= 40 for count in spread.values()), spread
    assert len(spread) == 4


def test_c57_affinity_survives_a_stale_report_of_the_request_just_ended() -> None:
    fleet = Fleet("a", "b")
    home = fleet.send("1", request((*PREFIX, 1)))
    fleet.now += 0.3
    fleet.table.update(
        replace(CARD, replica_id=home), replace(IDLE, version=2, n_running=1, waiting_tokens=344), None
    )
    fleet.table.release("1", home, fleet.now)

    assert fleet.choose(request((*PREFIX, 2))).ranked[0].replica_id == home


def test_affinity_survives_a_neighbour_that_only_decodes() -> None:
    fleet = Fleet("a", "b")
    home = fleet.send("long", request((*PREFIX, 1)))
    fleet.now += REPORT_AGE_S + 0.1
    fleet.table.update(replace(CARD, replica_id=home), replace(IDLE, version=2, n_running=1), None)

    assert fleet.choose(request((*PREFIX, 2))).ranked[0].replica_id == home


@pytest.mark.parametrize(
    ("n_running", "waiting_tokens", "goes_home"),
    [
        pytest.param((4, 4), 2900, True, id="home 8 + 2900 + 4 * 40 = 3068, elsewhere 600 + 4 * 632 = 3128"),
        pytest.param((4, 4), 3000, False, id="home 3168"),
        pytest.param((4, 0), 0, True, id="home 168, on the idle one 600"),
        pytest.param((4, 0), 500, False, id="home 668"),
    ],
)
def test_a_prefix_leaves_its_home_where_that_delays_all_together_less(
    n_running: tuple[int, int], waiting_tokens: int, goes_home: bool
) -> None:
    asked, fleet = request(PREFIX), Fleet()  # 592 of its 600 tokens are cached at home
    for name, n, waits, cached in (
        ("home", n_running[0], waiting_tokens, resident(asked, CARD)),
        ("other", n_running[1], 0, ()),
    ):
        load = replace(IDLE, n_running=n, waiting_tokens=waits, resident=cached)
        fleet.table.update(replace(CARD, replica_id=name), load, None)

    assert (fleet.choose(asked).ranked[0].replica_id == "home") == goes_home


def test_c58_a_replica_restarted_with_another_block_size_is_learned_anew() -> None:
    fleet = Fleet("a")
    asked = request(PREFIX)
    fleet.answer("1", asked)
    restarted = replace(CARD, replica_id="a", block_size=32)

    fleet.table.update(restarted, IDLE, None)
    (forgotten,) = fleet.choose(asked).ranked
    fleet.table.update(restarted, replace(IDLE, version=2, resident=resident(asked, restarted)), None)
    (relearned,) = fleet.choose(asked).ranked

    assert forgotten.n_uncached_tokens == len(PREFIX)
    assert relearned.n_uncached_tokens == len(PREFIX) - len(PREFIX) // 32 * 32


def test_replicas_of_different_block_sizes_are_each_matched_by_their_own_hashes() -> None:
    fleet = Fleet("a")
    asked = request(PREFIX)
    other = replace(CARD, replica_id="b", block_size=64)
    fleet.table.update(other, replace(IDLE, resident=resident(asked, other)), None)

    uncached = {candidate.replica_id: candidate.n_uncached_tokens for candidate in fleet.choose(asked).ranked}

    assert uncached == {"a": 600, "b": 600 - 9 * 64}


def test_a_replica_with_a_problem_is_excluded_with_the_reason() -> None:
    fleet = Fleet("a", "b")
    fleet.table.update(replace(CARD, replica_id="a"), IDLE, "the engine has died")

    choice = fleet.choose(request(PREFIX))

    assert [candidate.replica_id for candidate in choice.ranked] == ["b"]
    assert choice.excluded == (("a", "does not serve: the engine has died"),)


def test_a_choice_explains_itself_with_numbers() -> None:
    view = ReplicaView(
        card=replace(CARD, replica_id="a"),
        load=replace(IDLE, waiting_tokens=200, n_free_blocks=30),
        own=OwnLoad(n_sequences=2),
    )

    assert str(choose(request(PREFIX), [view], Random(0))) == (
        "a: 2184 = 600 uncached + 200 waiting + 1264 sequences + 120 short"
    )


def order(asked: Request, seed: int) -> tuple[str, ...]:
    fleet = Fleet("a", "b", "c", "d")
    fleet.random = Random(seed)
    return tuple(candidate.replica_id for candidate in fleet.choose(asked).ranked)


def test_equal_candidates_for_less_than_a_block_are_ordered_by_the_given_random_alone() -> None:
    short = request((1, 2, 3))
    assert order(short, 1) == order(short, 1)
    assert len({order(short, seed) for seed in range(20)}) > 5


def test_equal_candidates_are_ordered_by_the_prompts_first_block() -> None:
    assert len({order(request(PREFIX), seed) for seed in range(20)}) == 1
    assert len({order(unrelated(index), 1) for index in range(20)}) > 5


def test_a_prefix_that_several_replicas_hold_keeps_one_home() -> None:
    fleet = Fleet("a", "b")
    for name in ("a", "b"):
        fleet.table.update(
            replace(CARD, replica_id=name), replace(IDLE, resident=resident(request(PREFIX), CARD)), None
        )
    homes = {fleet.answer(f"k{index}", request((*PREFIX, index))) for index in range(20)}
    assert len(homes) == 1


def test_a_report_of_work_that_ended_a_second_ago_moves_no_prefix() -> None:
    fleet = Fleet("a", "b")
    home = fleet.answer("k0", request(PREFIX))
    late = replace(IDLE, version=2, n_running=1, waiting_tokens=len(PREFIX))
    fleet.now += 1.0
    fleet.table.update(replace(CARD, replica_id=home), late, None)
    assert fleet.answer("k1", request((*PREFIX, 1))) == home


def test_a_prompt_weighs_until_its_first_token_and_its_sequence_until_the_end() -> None:
    fleet = Fleet("a")
    asked = request(PREFIX)

    def load() -> tuple[int, int]:
        (view,) = fleet.table.views(fleet.now)
        return view.waiting_tokens, view.n_sequences

    fleet.send("1", asked)
    assert load() == (600, 1)
    fleet.now += 0.2
    for _ in range(2):  # the second time nothing changes
        fleet.table.mark_prefilled("1", fleet.now)
        assert load() == (0, 1)
    late = replace(IDLE, version=2, n_running=1, waiting_tokens=600)  # taken before, arrived after
    fleet.table.update(replace(CARD, replica_id="a"), late, None)
    assert load() == (0, 1)
    fleet.now += REPORT_AGE_S + 0.1  # a report that still says so is of another gateway's prompt
    assert load() == (600, 1)
    fleet.table.update(replace(CARD, replica_id="a"), replace(IDLE, version=3), None)
    fleet.table.release("1", "a", fleet.now)
    fleet.table.mark_prefilled("1", fleet.now)  # known no more
    assert load() == (0, 0)


def test_what_was_sent_is_remembered_up_to_the_size_of_the_replicas_cache() -> None:
    small = replace(CARD, replica_id="a", n_blocks=10)
    fleet = Fleet()
    fleet.table.update(small, IDLE, None)
    fleet.answer("1", request(PREFIX[:160]))
    fleet.answer("2", unrelated(1, 80))

    (old,) = fleet.choose(request(PREFIX[:160])).ranked
    (new,) = fleet.choose(unrelated(1, 80)).ranked

    assert old.n_uncached_tokens == 160 - 5 * 16  # its first five blocks, the deeper ones forgotten first
    assert new.n_uncached_tokens == 1


def test_another_replicas_acceptance_moves_the_charge() -> None:
    fleet = Fleet("a", "b")
    first, second = fleet.choose(request(PREFIX)).ranked
    fleet.table.charge("1", first, 1, fleet.now)

    fleet.table.accept("1", second.replica_id)
    fleet.table.release("1", first.replica_id, fleet.now)

    in_flight = {view.replica_id: view.own.n_sequences for view in fleet.table.views(fleet.now)}
    assert in_flight == {first.replica_id: 0, second.replica_id: 1}


def test_an_abandoned_request_returns_its_charge_unless_it_was_accepted() -> None:
    fleet = Fleet("a")
    (best,) = fleet.choose(request(PREFIX)).ranked
    fleet.table.charge("waiting", best, 1, fleet.now)
    fleet.table.charge("accepted", best, 1, fleet.now)
    fleet.table.accept("accepted", "a")

    for key in ("waiting", "accepted", "unknown"):
        fleet.table.abandon(key)

    assert fleet.table.n_in_flight(fleet.now) == 1


def test_a_charge_that_no_acceptance_follows_is_dropped_in_time() -> None:
    fleet = Fleet("a")
    (best,) = fleet.choose(request(PREFIX)).ranked
    fleet.table.charge("cancelled", best, 1, fleet.now)
    fleet.send("long", request(PREFIX))

    assert fleet.table.n_in_flight(fleet.now + ACCEPT_WITHIN_S) == 2
    assert fleet.table.n_in_flight(fleet.now + ACCEPT_WITHIN_S + 1) == 1


def test_a_replica_that_vanishes_takes_its_record_but_not_the_charges() -> None:
    fleet = Fleet("a")
    fleet.send("1", request(PREFIX))

    fleet.table.keep_only([])

    assert fleet.table.views(fleet.now) == []
    assert fleet.table.n_in_flight(fleet.now) == 1
    fleet.table.release("1", "a", fleet.now)
    assert fleet.table.n_in_flight(fleet.now) == 0


def test_all_choices_of_a_request_are_charged() -> None:
    fleet = Fleet("a")

    fleet.send("1", request(PREFIX, n=4))

    (view,) = fleet.table.views(fleet.now)
    assert view.own.n_sequences == 4


def test_each_choice_says_what_decided_it() -> None:
    asked = request(PREFIX)
    cached = resident(asked, CARD)
    cases: dict[str, dict[str, ReplicaLoad]] = {
        "no_news": {},
        "only_one": {"a": IDLE},
        "load": {"a": IDLE, "b": replace(IDLE, n_running=5)},
        "prefix": {"a": IDLE, "b": replace(IDLE, resident=cached)},
        "skipped_busy": {"a": IDLE, "b": replace(IDLE, n_running=12, resident=cached)},
        "all_busy": {"a": replace(IDLE, n_running=64), "b": replace(IDLE, n_running=64)},
    }
    for expected, loads in cases.items():
        fleet = Fleet()
        for name, load in loads.items():
            fleet.table.update(replace(CARD, replica_id=name), load, None)
        assert fleet.choose(asked).reason == expected
    assert set(cases) == set(ROUTING_REASONS)


def test_a_cache_that_does_not_make_up_for_the_load_is_no_reason() -> None:
    asked, fleet = request(PREFIX), Fleet()
    laden = replace(IDLE, waiting_tokens=5000, resident=resident(asked, CARD))
    for name, load in (("a", IDLE), ("b", laden)):
        fleet.table.update(replace(CARD, replica_id=name), load, None)
    choice = fleet.choose(asked)
    assert (choice.ranked[0].replica_id, choice.reason) == ("a", "load")
