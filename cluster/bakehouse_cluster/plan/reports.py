"""How routers hear of the replicas on the virtual clock: as often, and as late, as from Serve's controller."""

from collections.abc import Callable, Sequence
from functools import partial
from math import floor

from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad
from bakehouse_router.replicas import REPORT_PERIOD_S

from bakehouse_cluster.plan.clock import VirtualClock
from bakehouse_cluster.plan.replica import SimulatedReplica

# From the moment at which a report is taken to the one at which routers have it. At a period of 0.2 s reports were
# 0.11 to 0.43 s old (measured): 0.11 to 0.23 s on their way, of which this is the middle.
REPORT_DELAY_S = 0.17


class Reports:
    """Takes a report of each replica once a period, the replicas in turns, and lets `hear` have what is new.

    It pauses where there is no news and `is_needed` says that none will come, so that a simulation can end.
    """

    def __init__(
        self,
        clock: VirtualClock,
        replicas: Sequence[SimulatedReplica],
        *,
        hear: Callable[[ReplicaCard, ReplicaLoad], None],
        is_needed: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._replicas = replicas
        self._hear = hear
        self._is_needed = is_needed
        self._told = [replica.load.version for replica in replicas]
        self._is_paused = [True] * len(replicas)
        self._n_periods = [-1] * len(replicas)  # at the end of which the next report is due, or the last one was

    def resume(self) -> None:
        """Something may happen from now on."""
        for index, is_paused in enumerate(self._is_paused):
            if is_paused:
                self._is_paused[index] = False
                self._expect(index)

    def _expect(self, index: int) -> None:
        phase = index / len(self._replicas)
        n_periods = floor(self._clock() / REPORT_PERIOD_S - phase) + 1
        # Rounding may have brought the last one again.
        n_periods = self._n_periods[index] = max(n_periods, self._n_periods[index] + 1)
        moment = max((n_periods + phase) * REPORT_PERIOD_S, self._clock())
        self._clock.at(moment, partial(self._take, index))

    def _take(self, index: int) -> None:
        replica = self._replicas[index]
        has_news = replica.load.version != self._told[index]
        if has_news:
            self._told[index] = replica.load.version
            self._clock.at(self._clock() + REPORT_DELAY_S, partial(self._hear, replica.card, replica.load))
        if has_news or self._is_needed():
            self._expect(index)
        else:
            self._is_paused[index] = True
