"""What a simulated replica has done, as sums and averages over time."""

from dataclasses import dataclass

from bakehouse_replica.core.types import Capacity, ReplicaLoad

# A snapshot takes 33 us, where a token of a step takes 4.
NOTE_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTotals:
    """`running_s`, `waiting_s`: sequences times seconds. `held_s`: the share of blocks in tables times seconds."""

    n_steps: int
    busy_s: float
    running_s: float
    waiting_s: float
    held_s: float


class Totals:
    """Adds up; between two snapshots of the load, the earlier one holds."""

    def __init__(self, capacity: Capacity) -> None:
        self._n_blocks = capacity.n_blocks
        self._n_steps = 0
        self._busy_s = 0.0
        self._n_running = self._n_waiting = self._n_held = 0
        self._noted_s = 0.0
        self._running_s = self._waiting_s = self._held_s = 0.0

    def count_step(self, elapsed_s: float) -> None:
        """A step that takes so long."""
        self._n_steps += 1
        self._busy_s += elapsed_s

    def is_due(self, now: float) -> bool:
        """Whether the load is to be noted: after a plan, unless that was done less than `NOTE_PERIOD_S` ago."""
        return now - self._noted_s >= NOTE_PERIOD_S or not self._n_running

    def note(self, load: ReplicaLoad, now: float) -> None:
        """The load from now on."""
        self._add_until(now)
        self._n_running, self._n_waiting, self._n_held = load.n_running, load.n_waiting, load.n_held_blocks

    def until(self, now: float) -> ReplicaTotals:
        """All of it up to now."""
        self._add_until(now)
        return ReplicaTotals(
            n_steps=self._n_steps,
            busy_s=self._busy_s,
            running_s=self._running_s,
            waiting_s=self._waiting_s,
            held_s=self._held_s,
        )

    def _add_until(self, now: float) -> None:
        for_s, self._noted_s = now - self._noted_s, now
        self._running_s += self._n_running * for_s
        self._waiting_s += self._n_waiting * for_s
        self._held_s += self._n_held / self._n_blocks * for_s
