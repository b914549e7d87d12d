"""Finds the stop string that completes first in a text that arrives in pieces.

An Aho-Corasick automaton, so the cost per character does not depend on how many stops there are or how long they
are. Its state is the longest tail of the text that is a proper prefix of some stop: exactly what must be held
back, because everything before it can never become part of a stop.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """`depth`: characters of the prefix it stands for. `n_stop`: of the longest stop that ends here, or 0."""

    depth: int
    n_stop: int
    next: dict[str, int]
    fallback: int


def _trie(stops: tuple[str, ...]) -> tuple[list[dict[str, int]], list[int], list[int]]:
    """Children, depth and the length of the stop that ends there, per node; node 0 is the empty prefix."""
    children: list[dict[str, int]] = [{}]
    depths, n_stops = [0], [0]
    for stop in stops:
        node = 0
        for character in stop:
            if character not in children[node]:
                children[node][character] = len(children)
                children.append({})
                depths.append(depths[node] + 1)
                n_stops.append(0)
            node = children[node][character]
        n_stops[node] = len(stop)
    return children, depths, n_stops


def _automaton(stops: tuple[str, ...]) -> list[_Node]:
    children, depths, n_stops = _trie(stops)
    fallbacks = [0] * len(children)
    queue = deque(children[0].values())
    while queue:
        node = queue.popleft()
        n_stops[node] = n_stops[node] or n_stops[fallbacks[node]]
        for character, child in children[node].items():
            fallback = fallbacks[node]
            while fallback and character not in children[fallback]:
                fallback = fallbacks[fallback]
            fallbacks[child] = children[fallback].get(character, 0)
            queue.append(child)
    return [
        _Node(depth=depth, n_stop=n_stop, next=following, fallback=fallback)
        for depth, n_stop, following, fallback in zip(depths, n_stops, children, fallbacks, strict=True)
    ]


class StopMatcher:
    """Lets through what can no longer become part of a stop; ends at the first stop that completes.

    Of several stops that complete at the same character the longest counts. `keeps_stop`: the stop itself is let
    through, so nothing needs to be held back. `feed` after the end is an error.
    """

    def __init__(self, stops: tuple[str, ...], *, keeps_stop: bool = False) -> None:
        self._nodes = _automaton(stops)
        self._keeps_stop = keeps_stop
        self._state = 0
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """The text released by `text`. Where not `may_stop`, a completed stop is text like any other."""
        assert not self.is_stopped, "text after the stop"
        buffered = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            self._advance(character)
            n_stop = self._nodes[self._state].n_stop
            if n_stop and may_stop:
                self.is_stopped, self._held = True, ""
                return buffered[: index if self._keeps_stop else index - n_stop]
        released = len(buffered) - (0 if self._keeps_stop else self._nodes[self._state].depth)
        self._held = buffered[released:]
        return buffered[:released]

    def flush(self) -> str:
        """What is still held, at an end that is not a stop."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _advance(self, character: str) -> None:
        nodes, state = self._nodes, self._state
        while state and character not in nodes[state].next:
            state = nodes[state].fallback
        self._state = nodes[state].next.get(character, 0)
