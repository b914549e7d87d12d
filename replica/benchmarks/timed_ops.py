"""An `Ops` that passes every call on and adds up the time of each operation.

Recordings are done operation by operation, so that each can be timed; Python stands between them then.
"""

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

from bakehouse_kernels.api import Ops, Recording
from bakehouse_kernels.reference import PlayedAnew
from torch import Tensor


class TimedOps:
    """Stands in the place of `ops`; `seconds` by operation, since the last `clear`."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun_at = perf_counter()
            result = operation(*arguments, **named)
            self.seconds[name] += perf_counter() - begun_at
            return result

        setattr(self, name, timed)  # found directly from now on
        return timed

    def record(self, work: Callable[[Ops], Tensor]) -> Recording:
        """One whose operations are timed."""
        return PlayedAnew(cast("Ops", self), work)

    def clear(self) -> None:
        """Begin to count anew."""
        self.seconds.clear()
