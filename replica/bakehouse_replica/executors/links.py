"""Connections between rank 0 and each of the others: orders go one way, reports the other.

Each rank has two TCP connections to rank 0. A rank that waits for its next order waits in `recv`, for as long as
it takes, and costs nothing; the death of a process closes its connections, so both sides hear of it at once.
Nothing is pickled. Who connects proves by a secret that it has been started by rank 0.
"""

import hmac
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from bakehouse_replica.executors.control import (
    HEADER_WORDS,
    StepOrder,
    Words,
    decode,
    read_header,
)

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
# How soon rank 0, while it waits for the others to come, sees that one of them never will.
POLL_S = 0.2
# Whoever watches has named the lost rank before an operation gives up, after so many of the watch's limits.
STEP_LIMITS = 2.0
# Whoever connects says at once who it is.
_HELLO_TIMEOUT_S = 5.0
# So that a step ahead of the one that runs fits in: 256 sequences of 128 blocks are 140 kB.
_BUFFER_BYTES = 1 << 20
_HELLO_WORDS = 3
_REPORT_WORDS = 5


class Channel(IntEnum):
    """What a connection is for."""

    ORDERS = 0
    REPORTS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What a rank must know to join: where rank 0 waits for it, and the secret.

    `timeout_s`: how long a rank may be silent.
    """

    host: str
    port: int
    store_port: int
    size: int
    timeout_s: float
    secret: bytes = field(repr=False)


class ReportKind(IntEnum):
    """What a report says of its rank."""

    ALIVE = 0
    FAILED = 1  # by itself; the text says how
    BEREFT = 2  # another rank has left it in the middle of an operation
    REFUSED = 3  # it cannot serve as asked; the text is for the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How far a rank is: the last step it has begun, and its collective operations so far."""

    kind: ReportKind
    rank: int
    step: int
    n_begun: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Both connections of one rank, on either side."""

    orders: socket.socket
    reports: socket.socket

    def close(self) -> None:
        """Also wakes whoever waits in one of them; idempotent."""
        for connection in (self.orders, self.reports):
            hang_up(connection)
            connection.close()


class Reception:
    """Where rank 0 waits for the others."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(POLL_S)
        self._secret = secret

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def welcome(self, size: int, check: Callable[[], None]) -> list[Link]:
        """The links of ranks 1 to `size - 1`, once all have come; `check` raises where that is in vain."""
        arrived: dict[tuple[int, Channel], socket.socket] = {}
        wanted = {(rank, channel) for rank in range(1, size) for channel in Channel}
        while arrived.keys() != wanted:
            check()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            who = self._ask(connection)
            if who in wanted and who not in arrived:
                arrived[who] = connection
            else:
                connection.close()
        return [
            Link(orders=arrived[rank, Channel.ORDERS], reports=arrived[rank, Channel.REPORTS])
            for rank in range(1, size)
        ]

    def close(self) -> None:
        """Nobody is let in any more."""
        self._listener.close()

    def _ask(self, connection: socket.socket) -> tuple[int, Channel] | None:
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            said = _receive(connection, SECRET_BYTES + 4 * _HELLO_WORDS)
        except OSError:
            return None
        if said is None or not hmac.compare_digest(said[:SECRET_BYTES], self._secret):
            return None
        rank, channel, process_id = np.frombuffer(said[SECRET_BYTES:], np.int32).tolist()
        _tune(connection)
        if channel == Channel.REPORTS:
            logger.info("rank %d is process %d at %s", rank, process_id, connection.getpeername()[0])
        return rank, Channel(channel)


def join(invitation: Invitation, rank: int) -> Link:
    """A rank's side. Raises `OSError` where rank 0 is not there."""
    connections = []
    for channel in Channel:
        connection = socket.create_connection((invitation.host, invitation.port))
        _tune(connection)
        connection.sendall(invitation.secret + np.array((rank, channel, os.getpid()), np.int32).tobytes())
        connections.append(connection)
    return Link(orders=connections[Channel.ORDERS], reports=connections[Channel.REPORTS])


def receive_order(connection: socket.socket, expected: int) -> StepOrder | None:
    """The next order; None where rank 0 has closed the connection. Raises `ControlError` as `decode` does."""
    words = _receive(connection, 4 * HEADER_WORDS)
    if words is None:
        return None
    header = read_header(np.frombuffer(words, np.int32))
    body = _receive(connection, 4 * header.n_words)
    return None if body is None else decode(header, np.frombuffer(body, np.int32), expected=expected)


def send_order(connection: socket.socket, words: Words) -> None:
    """Raises `OSError` where the rank is gone."""
    connection.sendall(words.data)


def send_report(connection: socket.socket, report: Report) -> None:
    """Raises `OSError` where rank 0 is gone."""
    text = report.text.encode()
    words = np.array((report.kind, report.rank, report.step, report.n_begun, len(text)), np.int64)
    connection.sendall(words.tobytes() + text)


def receive_report(connection: socket.socket) -> Report | None:
    """The next report; None where the rank has closed the connection, or died."""
    said = _receive(connection, 8 * _REPORT_WORDS)
    if said is None:
        return None
    kind, rank, step, n_begun, n_text = np.frombuffer(said, np.int64).tolist()
    text = _receive(connection, n_text)
    if text is None:
        return None
    return Report(kind=ReportKind(kind), rank=rank, step=step, n_begun=n_begun, text=text.decode())


def hang_up(connection: socket.socket) -> None:
    """End a connection that others may be waiting in; idempotent."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def _receive(connection: socket.socket, n_bytes: int) -> bytearray | None:
    """So many bytes; None where the connection ends before."""
    said = bytearray(n_bytes)
    view, n_received = memoryview(said), 0
    while n_received < n_bytes:
        try:
            n_more = connection.recv_into(view[n_received:])
        except ConnectionError:
            return None
        if n_more == 0:
            return None
        n_received += n_more
    return said


def _tune(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
