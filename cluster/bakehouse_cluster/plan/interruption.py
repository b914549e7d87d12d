"""What Ctrl-C says and exits with."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The shell's convention for a program that Ctrl-C ended.
INTERRUPTED = 130


@contextmanager
def interruption_told(what: str) -> Iterator[None]:
    """Where the block is interrupted, one line says that `what` was not done, and the process exits with 130."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"bakehouse: interrupted before {what}", file=sys.stderr)
        sys.exit(INTERRUPTED)
