"""A mapping of bounded size, which forgets what was used longest ago."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Holds at most `max_items`; finding and keeping both count as use. For one thread at a time."""

    def __init__(self, max_items: int) -> None:
        assert max_items >= 1, f"room for {max_items} items"
        self._max_items = max_items
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: Key) -> Value | None:
        """What is kept under `key`, if it has not been forgotten."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def keep(self, key: Key, value: Value) -> None:
        """Also replaces what was there."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._max_items:
            self._values.popitem(last=False)
