"""Which sizes are simulated, and which one is the answer."""

from math import ceil, log2

import pytest
from bakehouse_cluster.bench.records import Outcome
from bakehouse_cluster.plan.search import Found, Run, exhaustive, search_sizes
from bakehouse_cluster.plan.summary import SizeSummary


def summary(n_replicas: int, *, meets: bool) -> SizeSummary:
    return SizeSummary(
        n_replicas=n_replicas,
        misses=() if meets else ("goodput is 0",),
        good_share=float(meets),
        duration_s=1.0,
        n_requests=1,
        outcomes=dict.fromkeys(Outcome, 0),
        n_input_tokens=0,
        n_output_tokens=0,
        output_tokens_per_s=0.0,
        total_tokens_per_s=0.0,
        requests_per_s=0.0,
        ttft_s=None,
        itl_s=None,
        e2e_s=None,
        hit_ratio=0.0,
        n_preemptions=0,
        n_steps=0,
        mean_running=0.0,
        mean_waiting=0.0,
        kv_use=0.0,
        busy=0.0,
        requests_by_replica=(),
        problems={},
    )


class Sizes:
    """Runs that meet the objective at some sizes; `asked` in order."""

    def __init__(self, sufficient: set[int]) -> None:
        self._sufficient = sufficient
        self.asked: list[int] = []

    def run(self, n_replicas: int) -> SizeSummary:
        self.asked.append(n_replicas)
        return summary(n_replicas, meets=n_replicas in self._sufficient)


def simulated(found: Found) -> list[int]:
    return [size.n_replicas for size in found.sizes]


@pytest.mark.parametrize("max_replicas", [1, 2, 7, 8, 33])
def test_the_answer_suffices_and_one_less_was_seen_not_to(max_replicas: int) -> None:
    for answer in range(1, max_replicas + 1):
        sizes = Sizes(set(range(answer, max_replicas + 1)))
        found = search_sizes(sizes.run, max_replicas)
        assert found.answer == answer
        assert answer == 1 or answer - 1 in sizes.asked
        assert len(set(sizes.asked)) == len(sizes.asked) <= 2 * ceil(log2(answer)) + 1
        assert simulated(found) == sorted(sizes.asked)


def test_nothing_is_simulated_beyond_the_first_sufficient_double() -> None:
    sizes = Sizes(set(range(5, 1000)))
    search_sizes(sizes.run, 1000)
    assert sizes.asked == [1, 2, 4, 8, 6, 5]


def test_where_no_size_suffices_the_largest_has_been_seen() -> None:
    sizes = Sizes(set())
    assert search_sizes(sizes.run, 6) == Found(sizes=tuple(map(sizes.run, (1, 2, 4, 6))), answer=None)


@pytest.mark.parametrize("search", [search_sizes, exhaustive])
def test_one_replica_may_be_all_there_is(search: object) -> None:
    assert callable(search)
    assert search(Sizes({1}).run, 1).answer == 1
    assert search(Sizes(set()).run, 1).answer is None


def test_an_exhaustive_search_answers_with_the_size_from_which_all_suffice() -> None:
    def answer(sufficient: set[int]) -> int | None:
        run: Run = Sizes(sufficient).run
        found = exhaustive(run, 6)
        assert simulated(found) == [1, 2, 3, 4, 5, 6]
        return found.answer

    assert answer({3, 4, 5, 6}) == 3
    assert answer({2, 4, 5, 6}) == 4  # 2 suffices by chance only
    assert answer({2, 3}) is None
