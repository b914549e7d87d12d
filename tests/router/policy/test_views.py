"""How a replica's own report and this router's record are joined."""

import pytest
from bakehouse_replica.core.types import ReplicaCard, ReplicaLoad
from bakehouse_router.policy.views import OwnLoad, ReplicaView

CARD = ReplicaCard(
    replica_id="a",
    model_name="m",
    model_digest="d",
    hash_key=b"k",
    block_size=4,
    n_blocks=100,
    vocabulary_size=50,
    max_model_len=400,
    max_sequences=8,
)


def load(*, n_running: int = 0, n_waiting: int = 0, waiting_tokens: int = 0) -> ReplicaLoad:
    return ReplicaLoad(
        version=1,
        n_running=n_running,
        n_waiting=n_waiting,
        waiting_tokens=waiting_tokens,
        n_free_blocks=100,
        n_cached_blocks=0,
        n_held_blocks=0,
        step_time_s=0.0,
    )


@pytest.mark.parametrize(
    ("reported", "own", "expected"),
    [
        pytest.param(None, OwnLoad(n_sequences=3), 3, id="no report yet: what was sent"),
        pytest.param(load(), OwnLoad(n_sequences=3), 3, id="not yet in the report"),
        pytest.param(load(n_running=2, n_waiting=1), OwnLoad(n_sequences=3), 3, id="the same three, once"),
        pytest.param(load(n_running=5), OwnLoad(n_sequences=3), 5, id="two are another gateway's"),
        pytest.param(
            load(n_running=3), OwnLoad(n_sequences=1, n_released_sequences=2), 1, id="two ended since the report"
        ),
        pytest.param(load(n_running=4), OwnLoad(), 4, id="all are another gateway's"),
    ],
)
def test_sequences_are_counted_once(reported: ReplicaLoad | None, own: OwnLoad, expected: int) -> None:
    assert ReplicaView(card=CARD, load=reported, own=own).n_sequences == expected


@pytest.mark.parametrize(
    ("reported", "own", "expected"),
    [
        pytest.param(None, OwnLoad(fresh_tokens=10, settled_tokens=20), 30, id="no report yet: all of it waits"),
        pytest.param(load(), OwnLoad(fresh_tokens=10), 10, id="fresh, not yet in the report"),
        pytest.param(load(waiting_tokens=6), OwnLoad(fresh_tokens=10), 10, id="fresh, partly computed"),
        pytest.param(load(waiting_tokens=6), OwnLoad(settled_tokens=20), 6, id="settled: what is left of it"),
        pytest.param(load(), OwnLoad(settled_tokens=20), 0, id="settled and computed: it only decodes now"),
        pytest.param(load(waiting_tokens=50), OwnLoad(settled_tokens=20), 50, id="the rest is another gateway's"),
        pytest.param(load(waiting_tokens=6), OwnLoad(released_tokens=10), 0, id="ended since the report"),
    ],
)
def test_waiting_tokens_are_counted_once(reported: ReplicaLoad | None, own: OwnLoad, expected: int) -> None:
    assert ReplicaView(card=CARD, load=reported, own=own).waiting_tokens == expected


@pytest.mark.parametrize(
    ("resident", "sent", "expected"),
    [
        pytest.param((), (), 0, id="nothing"),
        pytest.param((b"1", b"2"), (), 2, id="reported"),
        pytest.param((b"1",), (b"2", b"3"), 3, id="reported, and sent since"),
        pytest.param((b"2", b"3"), (), 0, id="a prefix without its first block is none"),
        pytest.param((b"1", b"3"), (), 1, id="up to the first hole"),
    ],
)
def test_cached_blocks_are_the_leading_ones_known(
    resident: tuple[bytes, ...], sent: tuple[bytes, ...], expected: int
) -> None:
    view = ReplicaView(card=CARD, resident=frozenset(resident), sent=frozenset(sent))

    assert view.n_cached_blocks((b"1", b"2", b"3")) == expected
