"""The process behind `grammar_sandbox.py`: has a vocabulary ready, and forks a child for each grammar to try.

Its vocabulary comes by standard input, then a connection for each grammar by the socket that its argument names.
It has one thread, as the others would be lost in a fork.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import Grammar, GrammarKind
from bakehouse_replica.grammar_compiler import GrammarCompiler
from bakehouse_replica.vocabulary import Vocabulary

_STACK_BYTES = 2 * 1024**2  # the least that threads get on Linux
_NICENESS = 5  # below the gateway and its neighbours


def main() -> None:
    """What runs there: `python -m bakehouse_router.grammar_server FD`."""
    compiler = _loaded_compiler(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child
    os.nice(_NICENESS)
    gc.freeze()  # a collection in a child would touch, and so copy, all that it shares
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.sendall(b"\0")
        while connection := _next_connection(control):
            if os.fork() == 0:
                control.close()
                _live(connection, compiler)
            connection.close()


def _loaded_compiler(packed_vocabulary: bytes) -> GrammarCompiler:
    pieces, special_names = json.loads(packed_vocabulary)
    vocabulary = Vocabulary(
        {token_id: bytes.fromhex(piece) for token_id, piece in enumerate(pieces)}, dict(special_names)
    )
    compiler = GrammarCompiler(lambda: vocabulary, vocabulary.n_tokens)
    with suppress(InvalidRequest):  # a vocabulary without this letter is loaded as well
        compiler.compile(Grammar(kind=GrammarKind.REGEX, text="a"))
    return compiler


def _next_connection(control: socket.socket) -> socket.socket | None:
    """None where the gateway has gone."""
    _, handles, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=handles[0]) if handles else None


def _live(connection: socket.socket, compiler: GrammarCompiler) -> NoReturn:
    """The whole life of a child."""
    try:
        kind, text, compute_s, n_bytes = json.loads(connection.makefile("rb").readline())
        with suppress(OSError):  # without /proc, as on macOS, time is the only bound
            n_most = _n_mapped_bytes() + n_bytes
            resource.setrlimit(resource.RLIMIT_AS, (n_most, n_most))
        signal.setitimer(signal.ITIMER_PROF, compute_s)  # its signal kills
        threading.stack_size(_STACK_BYTES)
        grammar = Grammar(kind=GrammarKind(kind), text=text)
        trial = threading.Thread(target=_try, args=(connection, compiler, grammar))
        trial.start()
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        trial.join()
    finally:
        os._exit(0)


def _try(connection: socket.socket, compiler: GrammarCompiler, grammar: Grammar) -> None:
    fault = ""
    try:
        compiler.compile(grammar)
    except InvalidRequest as error:
        fault = error.message
    connection.sendall(json.dumps(fault).encode())


def _end_with(connection: socket.socket) -> NoReturn:
    """Ends this process when the gateway no longer waits for it."""
    with suppress(OSError):
        connection.recv(1)
    os._exit(0)


def _n_mapped_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
