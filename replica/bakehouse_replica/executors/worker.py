"""A rank other than 0: joins, loads its part of the model, and does what rank 0 orders until that leaves.

Also the program that rank 0 starts where no Ray does: settings, invitation and rank come by the standard input.
"""

import logging
import os
import pickle
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import BlockCopy
from bakehouse_replica.executors.control import ControlError
from bakehouse_replica.executors.device_choice import device_of
from bakehouse_replica.executors.links import (
    STEP_LIMITS,
    Invitation,
    Link,
    Report,
    ReportKind,
    join,
    receive_order,
    send_report,
)
from bakehouse_replica.executors.loading import load_model
from bakehouse_replica.model.batch import FlatChunks
from bakehouse_replica.model.collective import Collective, CollectiveError, Group, Meeting
from bakehouse_replica.model.sizing import choose_max_model_len
from bakehouse_replica.model.spec import read_spec
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import open_source

logger = logging.getLogger(__name__)

_REPORTS_PER_LIMIT = 5
_LONGEST_PERIOD_S = 1.0
# For a step, or a load of weights, from which nothing else wakes a rank whose rank 0 has gone.
_ORPHAN_GRACE_S = 5.0


class Follower(Protocol):
    """What does a rank's part of the steps."""

    def follow(self, copies: tuple[BlockCopy, ...], flat: FlatChunks | None) -> None:
        """One step."""
        ...


Load = Callable[[Collective], Follower]


class Reporter:
    """Tells rank 0 now and then how far this rank is, from a thread of its own; `on_orphaned` once it has gone."""

    def __init__(
        self, connection: socket.socket, rank: int, timeout_s: float, on_orphaned: Callable[[], None]
    ) -> None:
        self.step = 0
        self.collective: Collective | None = None
        self._connection = connection
        self._rank = rank
        self._period_s = min(_LONGEST_PERIOD_S, timeout_s / _REPORTS_PER_LIMIT)
        self._on_orphaned = on_orphaned
        self._lock = threading.Lock()
        self._is_orphaned = threading.Event()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bakehouse-reports", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def report(self, kind: ReportKind, text: str = "") -> None:
        """At once; does nothing where rank 0 has gone."""
        n_begun = 0 if self.collective is None else self.collective.n_begun
        report = Report(kind=kind, rank=self._rank, step=self.step, n_begun=n_begun, text=text)
        with self._lock:
            try:
                send_report(self._connection, report)
            except OSError:
                self._is_orphaned.set()

    def check(self) -> None:
        """Raises `CollectiveError` where rank 0 has gone, so that nobody waits for it within a step."""
        if self._is_orphaned.is_set():
            raise CollectiveError("rank 0 has gone")

    def end(self) -> None:
        """This rank has ended by itself."""
        self.collective = None
        self._has_ended.set()
        self._thread.join()  # it still looks at the connection, which can be closed now

    def wait_until_orphaned(self) -> None:
        """Until rank 0 has gone: before, the end of this rank's connections would mean its death."""
        self._is_orphaned.wait()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while not self._is_orphaned.is_set():
                self.report(ReportKind.ALIVE)
                if selector.select(self._period_s):  # rank 0 says nothing here: it has closed it, or died
                    self._is_orphaned.set()
        if not self._has_ended.wait(_ORPHAN_GRACE_S):
            self._on_orphaned()


def run_rank(
    invitation: Invitation,
    rank: int,
    load: Load,
    find_device: Callable[[], torch.device],
    on_orphaned: Callable[[], None],
) -> None:
    """Takes part as `rank` until rank 0 leaves, or tells it what has failed here and waits for it to leave.

    `find_device` may raise `StartupError`, as `load` may.
    """
    link = join(invitation, rank)
    reporter = Reporter(link.reports, rank, invitation.timeout_s, on_orphaned)
    reporter.start()
    try:
        _take_part(invitation, rank, link, reporter, load, find_device())
    except StartupError as error:
        reporter.report(ReportKind.REFUSED, str(error))
    except CollectiveError as error:
        reporter.report(ReportKind.BEREFT, str(error))
    except ControlError as error:
        reporter.report(ReportKind.FAILED, str(error))
    except Exception as error:
        logger.error("rank %d has failed", rank, exc_info=error)
        reporter.report(ReportKind.FAILED, f"{type(error).__name__}: {error}")
    finally:
        reporter.wait_until_orphaned()
        reporter.end()
        link.close()


def _take_part(
    invitation: Invitation, rank: int, link: Link, reporter: Reporter, load: Load, device: torch.device
) -> None:
    meeting = Meeting(
        rank=rank,
        size=invitation.size,
        host=invitation.host,
        port=invitation.store_port,
        own_host=link.orders.getsockname()[0],
    )
    collective = Group(meeting, device, reporter.check)
    reporter.collective = collective
    follower = load(collective)
    collective.limit(STEP_LIMITS * invitation.timeout_s)
    while (order := receive_order(link.orders, expected=reporter.step + 1)) is not None:
        reporter.step = order.number
        follower.follow(order.copies, order.flat)


def serve_rank(settings: ReplicaSettings, invitation: Invitation, rank: int) -> None:
    """This process is a rank of a replica with these settings; it ends, at the latest, soon after rank 0 does."""

    def load(collective: Collective) -> Follower:
        files = open_source(settings.source)
        spec = read_spec(files)
        max_model_len = choose_max_model_len(spec.context_length, settings.max_model_len)
        return load_model(settings, files, spec, max_model_len, collective=collective)

    run_rank(invitation, rank, load, lambda: device_of(settings), on_orphaned=lambda: os._exit(1))


def main() -> None:
    """The program."""
    logging.basicConfig(level=logging.WARNING)
    settings, invitation, rank = pickle.load(sys.stdin.buffer)
    serve_rank(settings, invitation, rank)
    # Threads of a process group may still wait for a rank that is lost, and an orderly end would wait for them.
    os._exit(0)


if __name__ == "__main__":
    main()
