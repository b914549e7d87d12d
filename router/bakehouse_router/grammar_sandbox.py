"""Tries grammars in processes of their own, one each, which may die or be killed over them without harm.

llguidance bounds what most grammars cost, but not all (measured with 1.9): the intersection of 20 patterns takes
11 s, that of 30 more than 20 s, and 700 definitions that refer to each other in a row overflow its stack, which
ends the process. What compiles here, within its bounds and on a small stack, does so in a replica too.

`grammar_server.py` is a process that has the vocabulary ready and forks for each grammar, so that a new one costs
milliseconds. It gets its end of a pair of sockets, over which gateway and child speak in JSON: a grammar and its
bounds, then what is wrong with it. A child ends with these sockets, the server with its own.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass

from bakehouse_replica.core.sampling import Grammar
from bakehouse_replica.vocabulary import Vocabulary

_MAX_START_S = 60.0  # about 1 s on an idle machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What trying one grammar may take: seconds of a processor, and bytes beside the vocabulary."""

    compute_s: float
    n_bytes: int


class GrammarSandbox:
    """Tries grammars over `vocabulary`, any number at a time; its server starts at the first."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._starting: asyncio.Task[_Server] | None = None

    async def start(self) -> None:
        """Returns when the server is ready, a new one where the last has died."""
        await self._server()

    async def find_fault(self, grammar: Grammar, bounds: Bounds) -> str | None:
        """What is wrong with a grammar, empty where nothing is, None where it is beyond its bounds.

        The process ends where this is cancelled.
        """
        server = await self._server()
        question = [grammar.kind, grammar.text, bounds.compute_s, bounds.n_bytes]
        try:
            reader, writer = await asyncio.open_connection(sock=server.fork())
            try:
                writer.write(json.dumps(question).encode() + b"\n")
                answer = await reader.read()
            finally:
                writer.close()
        except OSError:
            return None
        return str(json.loads(answer)) if answer else None

    async def _server(self) -> "_Server":
        starting = self._starting
        if starting is None or (starting.done() and not _is_serving(starting)):
            starting = self._starting = asyncio.create_task(asyncio.to_thread(_Server, self._vocabulary))
        return await asyncio.shield(starting)  # others wait for it too


class _Server:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bakehouse_router.grammar_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # Threads do not survive a fork, and numpy's library for linear algebra starts some.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                start_new_session=True,  # an interrupt at the terminal is the parent's
            )
        self.end = weakref.finalize(self, _end, self._process, self._socket)
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stdin:
            stdin.write(_packed_vocabulary(vocabulary))
        self._socket.settimeout(_MAX_START_S)
        with suppress(OSError):
            if self._socket.recv(1):
                return
        self.end()
        raise RuntimeError("the process that tries grammars does not start")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> socket.socket:
        """A connection to a new process for one grammar. Raises `OSError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [b"\0"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours


def _is_serving(started: "asyncio.Task[_Server]") -> bool:
    return not started.cancelled() and started.exception() is None and started.result().is_alive


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _packed_vocabulary(vocabulary: Vocabulary) -> bytes:
    pieces = [vocabulary.bytes_of(token_id).hex() for token_id in range(vocabulary.n_tokens)]
    return json.dumps([pieces, list(vocabulary.special_names.items())]).encode()
