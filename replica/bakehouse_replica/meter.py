"""What an engine counts beside its scheduler: how long the parts of a step take, and whether audits pass.

Owned by the engine's thread; others read `series` and `status_series`, which are replaced whole.
"""

import logging
from collections.abc import Callable

from bakehouse_replica.core.counts import Series
from bakehouse_replica.core.metric_table import KV_CONSISTENT, METRICS, REPLICA_SERVES, STEP_SECONDS
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


class Meter:
    """The counts of one replica, those of its scheduler among them."""

    def __init__(self) -> None:
        self.counts = replica_counts()
        self.counts.put(KV_CONSISTENT, 1)
        self.series: tuple[Series, ...] = ()
        self.status_series: tuple[Series, ...] = ()
        self._taken_at = float("-inf")
        self._audit_due_at = float("-inf")
        self._audit_pause_s = AUDIT_PERIOD_S

    def count_step(self, begun_at: float, planned_at: float, executed_at: float, published_at: float) -> None:
        """The four moments that part a step in three."""
        self.counts.observe(STEP_SECONDS, planned_at - begun_at, "plan")
        self.counts.observe(STEP_SECONDS, executed_at - planned_at, "execute")
        self.counts.observe(STEP_SECONDS, published_at - executed_at, "publish")

    def is_due(self, now: float) -> bool:
        """Whether samples were last taken long ago."""
        return now - self._taken_at >= SERIES_PERIOD_S

    def take(self, now: float, *, serves: bool) -> None:
        """Copies the counts for others."""
        self._taken_at = now
        self.counts.put(REPLICA_SERVES, serves)
        self.series = self.counts.series()
        self.status_series = tuple(series for series in self.series if series.name in _OWN_NAMES)

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
