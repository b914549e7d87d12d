"""Cards and loads survive the trip through JSON, which is stricter than Serve's own transport."""

import json

import pytest
from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad
from bakehouse_replica.core.wire import card_from_wire, card_to_wire, load_from_wire, load_to_wire


def test_a_card_survives_the_wire() -> None:
    card = ReplicaCard(
        replica_id="r1",
        model_name="smollm2",
        model_digest="d" * 32,
        hash_key=bytes(range(32)),
        block_size=16,
        n_blocks=100,
        vocabulary_size=49152,
        max_model_len=8192,
        max_sequences=64,
    )
    assert card_from_wire(json.loads(json.dumps(card_to_wire(card)))) == card


@pytest.mark.parametrize("resident", [(), (b"12345678",), (b"\x00" * 8, b"\xff" * 8)])
@pytest.mark.parametrize("problem", [None, "the engine has failed"])
def test_a_load_survives_the_wire(resident: tuple[bytes, ...], problem: str | None) -> None:
    load = ReplicaLoad(
        version=3,
        n_running=1,
        n_waiting=2,
        waiting_tokens=300,
        n_free_blocks=4,
        n_cached_blocks=5,
        n_held_blocks=6,
        step_time_s=0.025,
        resident=resident,
    )
    assert load_from_wire(json.loads(json.dumps(load_to_wire(load, problem)))) == (load, problem)


def test_a_replica_that_has_not_reported_has_no_load() -> None:
    assert load_from_wire({}) == (None, None)
