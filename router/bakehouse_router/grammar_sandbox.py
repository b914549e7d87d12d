"""Tries grammars in a process of its own, which may die or be killed over one without harm.

llguidance bounds what most grammars cost, but not all (measured with 1.9): the intersection of 20 patterns takes
11 s, that of 30 more than 20 s, and 700 definitions that refer to each other in a row overflow its stack, which
ends the process. What compiles here, in time and on a small stack, does so in a replica too.

Parent and child speak in JSON over a pair of pipes: the vocabulary first, then a grammar and what is wrong with
it, in turn. The child ends with the pipe, or with its parent.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.grammar_compiler import GrammarCompiler
from bakehouse_replica.vocabulary import Vocabulary

MAX_COMPILE_S = 1.5
_MAX_START_S = 60.0  # about 0.5 s on an idle machine
_STACK_BYTES = 2 * 1024**2  # the least that threads get on Linux
_MAX_BYTES = 2 * 1024**3
_LOOK_S = 1.0


class TooCostly(Exception):
    """The process was killed over a grammar, or has died of it."""


class GrammarSandbox:
    """Tries grammars over `vocabulary`, one at a time; its process starts at the first."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._child: _Child | None = None

    def find_fault(self, grammar: Grammar) -> str:
        """What is wrong with a grammar, empty where nothing is. Raises `TooCostly` after `MAX_COMPILE_S`."""
        if self._child is None or not self._child.is_alive:
            self._child = _Child(self._vocabulary)
        fault = self._child.find_fault(grammar)
        if fault is None:
            self._child.end()
            self._child = None
            raise TooCostly(f"the grammar takes more memory, or more than {MAX_COMPILE_S:g} s, to compile")
        return fault


class _Child:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "bakehouse_router.grammar_sandbox", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is the parent's
        )
        theirs.close()
        self.end = weakref.finalize(self, _end, self._process, self._pipe)
        self._pipe.send_bytes(_packed_vocabulary(vocabulary))
        if self._received(_MAX_START_S) is None:
            self.end()
            raise RuntimeError("the process that tries grammars does not start")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def find_fault(self, grammar: Grammar) -> str | None:
        """None where it has died, or must."""
        try:
            self._pipe.send_bytes(json.dumps([grammar.kind, grammar.text]).encode())
        except OSError:
            return None
        return self._received(MAX_COMPILE_S)

    def _received(self, timeout_s: float) -> str | None:
        try:
            return self._pipe.recv_bytes().decode() if self._pipe.poll(timeout_s) else None
        except (EOFError, OSError):
            return None


def _end(process: subprocess.Popen[bytes], pipe: "Connection[object, object]") -> None:
    pipe.close()
    process.kill()
    process.wait()


def _packed_vocabulary(vocabulary: Vocabulary) -> bytes:
    pieces = [vocabulary.bytes_of(token_id).hex() for token_id in range(vocabulary.n_tokens)]
    return json.dumps([pieces, list(vocabulary.special_names.items())]).encode()


def _unpacked_vocabulary(packed: bytes) -> Vocabulary:
    pieces, special_names = json.loads(packed)
    return Vocabulary(
        {token_id: bytes.fromhex(piece) for token_id, piece in enumerate(pieces)}, dict(special_names)
    )


def _serve(pipe: "Connection[object, object]") -> None:
    """The child's life."""
    vocabulary = _unpacked_vocabulary(pipe.recv_bytes())
    compiler = GrammarCompiler(lambda: vocabulary, vocabulary.n_tokens)
    pipe.send_bytes(b"")
    while True:
        try:
            kind, text = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            compiler.compile(Grammar(kind=GrammarKind(kind), text=text))
        except InvalidRequest as error:
            pipe.send_bytes(error.message.encode(errors="replace"))
        else:
            pipe.send_bytes(b"")


def main() -> None:
    """What runs in the child: `python -m bakehouse_router.grammar_sandbox FD`."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(int(sys.argv[1])),), daemon=True)
    thread.start()
    parent_id = os.getppid()
    while thread.is_alive() and os.getppid() == parent_id:  # a parent that is killed can end nobody
        thread.join(_LOOK_S)


if __name__ == "__main__":
    main()
