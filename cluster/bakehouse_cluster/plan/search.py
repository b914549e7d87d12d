"""Which numbers of replicas to simulate, so that the smallest sufficient one is found with few runs.

More replicas share the same requests, so each has less to do: that larger fleets do at least as well is the rule,
but it is no theorem. Routing may tear a prefix apart, and near the limit two sizes may change places. So the
search takes the rule for granted where it skips sizes, and proves its answer where it stands: n is sufficient and
n - 1 is not, both simulated. `exhaustive` takes nothing for granted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bakehouse_cluster.plan.summary import SizeSummary

Run = Callable[[int], SizeSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`sizes`: what was simulated, smallest first. `answer`: the smallest that suffices, None where none does."""

    sizes: tuple[SizeSummary, ...]
    answer: int | None


def search_sizes(run: Run, max_replicas: int) -> Found:
    """Doubles until a size is sufficient, then halves the distance: some 2 log2(answer) runs."""
    sizes: dict[int, SizeSummary] = {}
    insufficient, candidate = 0, 1
    while True:
        sizes[candidate] = run(candidate)
        if sizes[candidate].meets:
            break
        if candidate == max_replicas:
            return _found(sizes.values(), None)
        insufficient, candidate = candidate, min(2 * candidate, max_replicas)
    sufficient = candidate
    while sufficient - insufficient > 1:
        middle = (sufficient + insufficient) // 2
        sizes[middle] = run(middle)
        if sizes[middle].meets:
            sufficient = middle
        else:
            insufficient = middle
    return _found(sizes.values(), sufficient)


def exhaustive(run: Run, max_replicas: int) -> Found:
    """Every size from 1 on; the answer is the one from which all larger ones are sufficient, too."""
    sizes = [run(n_replicas) for n_replicas in range(1, max_replicas + 1)]
    answer: int | None = None
    for size in reversed(sizes):
        if not size.meets:
            break
        answer = size.n_replicas
    return _found(sizes, answer)


def _found(sizes: Iterable[SizeSummary], answer: int | None) -> Found:
    return Found(sizes=tuple(sorted(sizes, key=lambda size: size.n_replicas)), answer=answer)
