"""What an engine counts beside its scheduler: how long the parts of a step take, and whether audits pass.

Owned by the engine's thread; others read `series` and `status_series`, of samples that are replaced whole. While
the engine sleeps, blocks stay as they are and their time goes on: whoever reads brings it up to date.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from bakehouse_replica.core.counts import Distribution, Series
from bakehouse_replica.core.metric_table import (
    KV_BLOCK_SECONDS,
    KV_BLOCKS,
    KV_CONSISTENT,
    METRICS,
    REPLICA_SERVES,
    STEP_SECONDS,
)
from bakehouse_replica.core.tally import replica_counts

logger = logging.getLogger(__name__)

# Readers ask twice a second; a copy of all series takes 30 us.
SERIES_PERIOD_S = 0.5
# An audit walks all blocks and holds up the engine: 18 ms for 4,096 blocks, 0.1 s for 65,536 (measured). So it
# waits for an idle moment, at most so many times its period, and takes no larger share of the time than this.
AUDIT_PERIOD_S = 10.0
AUDIT_PATIENCE = 6.0
AUDIT_SHARE = 0.001
_OWN_NAMES = frozenset(metric.name for metric in METRICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """All series as of `taken_at`; `is_asleep`: nothing but time has changed since."""

    series: tuple[Series, ...] = ()
    taken_at: float = float("-inf")
    is_asleep: bool = False

    def series_at(self, now: float) -> tuple[Series, ...]:
        if not self.is_asleep or now <= self.taken_at:
            return self.series
        n_blocks = {one.labels: one.value for one in self.series if one.name == KV_BLOCKS.name}
        return tuple(
            _grown(one, n_blocks[one.labels], now - self.taken_at) if one.name == KV_BLOCK_SECONDS.name else one
            for one in self.series
        )


def _grown(seconds: Series, n_blocks: float | Distribution, elapsed_s: float) -> Series:
    assert not isinstance(seconds.value, Distribution), "it is a counter"
    assert not isinstance(n_blocks, Distribution), "it is a gauge"
    return Series(seconds.name, seconds.labels, seconds.value + n_blocks * elapsed_s)


class Meter:
    """The counts of one replica, those of its scheduler among them."""

    def __init__(self) -> None:
        self.counts = replica_counts()
        self.counts.put(KV_CONSISTENT, 1)
        self._samples = _Samples()
        self._audit_due_at = float("-inf")
        self._audit_pause_s = AUDIT_PERIOD_S

    def count_step(self, begun_at: float, planned_at: float, executed_at: float, published_at: float) -> None:
        """The four moments that part a step in three."""
        self.counts.observe(STEP_SECONDS, planned_at - begun_at, "plan")
        self.counts.observe(STEP_SECONDS, executed_at - planned_at, "execute")
        self.counts.observe(STEP_SECONDS, published_at - executed_at, "publish")

    def is_due(self, now: float) -> bool:
        """Whether samples were last taken long ago."""
        return now - self._samples.taken_at >= SERIES_PERIOD_S

    def take(self, now: float, *, serves: bool, sleeps: bool = False) -> None:
        """Copies the counts for others; `sleeps`: nothing will change before `wake` is called."""
        self.counts.put(REPLICA_SERVES, serves)
        self._samples = _Samples(series=self.counts.series(), taken_at=now, is_asleep=sleeps)

    def wake(self, now: float) -> None:
        """From now on more than time may change."""
        self._samples = _Samples(series=self._samples.series_at(now), taken_at=self._samples.taken_at)

    def series(self, now: float) -> tuple[Series, ...]:
        """All that is counted, as of half a second or a step before `now`, which the caller has read before."""
        return self._samples.series_at(now)

    def status_series(self, now: float) -> tuple[Series, ...]:
        """As `series`, but for what goes by other servers' names."""
        return tuple(one for one in self.series(now) if one.name in _OWN_NAMES)

    def audit_if_due(self, check: Callable[[], None], clock: Callable[[], float], *, is_idle: bool) -> None:
        """Runs `check`, which asserts, where it is time to; a failure is logged, and remembered for ever."""
        begun_at = clock()
        patience_s = 0.0 if is_idle else (AUDIT_PATIENCE - 1) * self._audit_pause_s
        if begun_at < self._audit_due_at + patience_s:
            return
        try:
            check()
        except AssertionError:
            logger.exception("the audit of sequences and KV blocks has failed; answers may be wrong from here on")
            self.counts.put(KV_CONSISTENT, 0)
        ended_at = clock()
        self._audit_pause_s = max(AUDIT_PERIOD_S, (ended_at - begun_at) / AUDIT_SHARE)
        self._audit_due_at = ended_at + self._audit_pause_s
