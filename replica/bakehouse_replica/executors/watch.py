"""Rank 0's watch over the other ranks: notices who is lost, and says which rank it is.

    closed connection           the rank's process has died                                    at once
    report of a failure         it says what went wrong: an error, a step out of turn          at once
    no report                   it hangs, or its machine is gone                               after the time limit
    no progress in a step       some wait for others, which have begun fewer operations        after the time limit

A rank reports a few times within the time limit whether there is work or not, so idle hours look like busy ones. A
step makes progress as long as any rank begins an operation: the limit is not one for whole steps.
"""

import logging
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from socket import socket

from bakehouse_replica.core.errors import BakehouseError, RankLost, StartupError
from bakehouse_replica.executors.links import Report, ReportKind, receive_report

logger = logging.getLogger(__name__)

# A rank that another one has left hears of it first where both are on its machine: the other is the one to name.
_BEREFT_GRACE_S = 1.0
_CLOSE_GRACE_S = 10.0
_POLLS_PER_LIMIT = 8
_LONGEST_POLL_S = 0.1


class Watch:
    """A thread from `start` to `close`, or to the first loss."""

    def __init__(
        self,
        connections: Sequence[socket],
        *,
        timeout_s: float,
        n_begun: Callable[[], int],
        on_loss: Callable[[BakehouseError], None],
    ) -> None:
        """Of ranks 1, 2, … in order; `n_begun`: rank 0's own operations; `on_loss` is called in the thread."""
        self._connections = connections
        self._timeout_s = timeout_s
        self._poll_s = min(_LONGEST_POLL_S, timeout_s / _POLLS_PER_LIMIT)
        self._n_begun = n_begun
        self._on_loss = on_loss
        self._loss: BakehouseError | None = None
        self._is_lost = threading.Event()
        self._is_closed = threading.Event()
        now = time.monotonic()
        self._reports: dict[int, Report] = {}
        self._heard_s = dict.fromkeys(range(1, len(connections) + 1), now)
        self._bereft_s: float | None = None
        self._step = 0
        self._n_flights = 0
        self._progress: object = None
        self._progressed_s = now
        self._thread = threading.Thread(target=self._run, name="bakehouse-watch", daemon=True)

    # --- Any thread -----------------------------------------------------------------------------------------

    @property
    def loss(self) -> BakehouseError | None:
        """What has happened; None while all is well."""
        return self._loss

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def check(self) -> None:
        """Raises the loss, if there is one."""
        if self._loss is not None:
            raise self._loss

    def explain(self, error: Exception) -> BakehouseError:
        """Which rank is behind an error that rank 0 has met; waits for a moment until that is known."""
        if self._is_lost.wait(2 * _BEREFT_GRACE_S) and self._loss is not None:
            return self._loss
        return RankLost(f"rank 0 has lost another rank, which has not said why: {error}")

    def step_begins(self, number: int) -> None:
        """From now on ranks are expected to get on."""
        self._step = number
        self._n_flights += 1

    def step_ends(self) -> None:
        """The oldest step that had begun is over."""
        self._n_flights -= 1

    def close(self) -> None:
        """Ranks may leave; idempotent."""
        self._is_closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_GRACE_S)  # it may be aborting what never ends

    # --- The watch's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections, start=1):
                selector.register(connection, selectors.EVENT_READ, rank)
            while not self._is_closed.is_set() and self._loss is None:
                readable = [key.data for key, _ in selector.select(self._poll_s)]
                loss = self._hear(readable) or self._judge(time.monotonic())
                if loss is not None and not self._is_closed.is_set():
                    self._lose(loss)

    def _lose(self, loss: BakehouseError) -> None:
        logger.error("%s", loss)
        self._loss = loss
        self._is_lost.set()
        self._on_loss(loss)

    def _hear(self, readable: Sequence[int]) -> BakehouseError | None:
        dead = []
        for rank in readable:
            report = receive_report(self._connections[rank - 1])
            if report is None:
                dead.append(rank)
                continue
            self._heard_s[rank] = time.monotonic()
            self._reports[rank] = report
            if report.kind is ReportKind.FAILED:
                return RankLost(f"rank {rank} has failed: {report.text}")
            if report.kind is ReportKind.REFUSED:
                return StartupError(f"rank {rank}: {report.text}")
            if report.kind is ReportKind.BEREFT and self._bereft_s is None:
                self._bereft_s = time.monotonic()
        return RankLost(f"{_named(dead)} died") if dead else None

    def _judge(self, now: float) -> RankLost | None:
        silent = [rank for rank, heard_s in self._heard_s.items() if now - heard_s > self._timeout_s]
        if silent:
            return RankLost(f"{_named(silent)} been silent for {self._timeout_s:g} s")
        if self._bereft_s is not None and now - self._bereft_s > _BEREFT_GRACE_S:
            bereft = [rank for rank, report in self._reports.items() if report.kind is ReportKind.BEREFT]
            return RankLost(f"{_named(bereft)} lost another rank: {self._reports[bereft[0]].text}")
        return self._judge_progress(now)

    def _judge_progress(self, now: float) -> RankLost | None:
        own = (self._step, self._n_begun())
        reached = {0: own} | {rank: (report.step, report.n_begun) for rank, report in self._reports.items()}
        if reached != self._progress or self._n_flights == 0:
            self._progress, self._progressed_s = reached, now
            return None
        if now - self._progressed_s <= self._timeout_s:
            return None
        last = min(reached.values())
        behind = [rank for rank, place in reached.items() if place == last]
        if len(behind) == len(reached):
            return RankLost(f"no rank has got on in step {self._step} for {self._timeout_s:g} s")
        return RankLost(f"{_named(behind)} not taken part in step {self._step} for {self._timeout_s:g} s")


def _named(ranks: Sequence[int]) -> str:
    """`rank 1 has` or `ranks 1, 2 have`."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
