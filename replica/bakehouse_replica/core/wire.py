"""Cards and loads as small dicts of JSON values, the form in which Serve carries a replica's own news.

Serve copies a replica's routing stats to every handle of the cluster each time they change, so they stay flat and
short: the resident hashes are one hexadecimal string.
"""

from collections.abc import Mapping
from dataclasses import asdict

from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad

WireValue = int | float | str | None
RESIDENT_HEX_CHARS = 16  # 8 bytes a hash


def card_to_wire(card: ReplicaCard) -> dict[str, WireValue]:
    """The card, its secret key in hexadecimal: for the inside of the cluster only."""
    return {**asdict(card), "hash_key": card.hash_key.hex()}


def card_from_wire(wire: Mapping[str, WireValue]) -> ReplicaCard:
    """The card that `card_to_wire` was given."""
    return ReplicaCard(**{**wire, "hash_key": bytes.fromhex(str(wire["hash_key"]))})  # type: ignore[arg-type]


def load_to_wire(load: ReplicaLoad, problem: str | None) -> dict[str, WireValue]:
    """The load, with what is wrong with the replica, if anything is."""
    return {**asdict(load), "resident": b"".join(load.resident).hex(), "problem": problem}


def load_from_wire(wire: Mapping[str, WireValue]) -> tuple[ReplicaLoad | None, str | None]:
    """The load and the problem that `load_to_wire` was given; no load where the replica has not reported yet."""
    if not wire:
        return None, None
    fields = {name: value for name, value in wire.items() if name not in ("problem", "resident")}
    digits = str(wire["resident"])
    resident = tuple(
        bytes.fromhex(digits[begin : begin + RESIDENT_HEX_CHARS])
        for begin in range(0, len(digits), RESIDENT_HEX_CHARS)
    )
    problem = wire["problem"]
    load = ReplicaLoad(**fields, resident=resident)  # type: ignore[arg-type]
    return load, None if problem is None else str(problem)
