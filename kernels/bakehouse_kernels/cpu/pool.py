"""Numba's thread pool, of which a process has one."""

from threading import Lock
from typing import Any

import numba

# Its settings are made at run time, where type checkers do not see them.
_settings: Any = numba.config

# Whoever runs a parallel kernel holds this: the `workqueue` layer ends the process when two threads enter at once.
pool_lock = Lock()


def choose_layer() -> None:
    """Take `workqueue`, the layer that never spins and is there on every machine.

    Without effect where this process has started another layer already; that one serves as well.
    """
    _settings.THREADING_LAYER = "workqueue"


def n_cores() -> int:
    """Threads that the pool can have: the cores this process may use."""
    return int(_settings.NUMBA_NUM_THREADS)
