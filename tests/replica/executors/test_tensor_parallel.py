"""A rank that is lost is named, whatever has become of it, and nobody is lost for having nothing to do."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from bakehouse_replica.core.errors import BakehouseError, RankLost, StartupError
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.types import BlockCopy
from bakehouse_replica.executors.in_process import InProcessExecutor, build_executor
from bakehouse_replica.executors.links import Channel, Invitation, Reception, join
from bakehouse_replica.executors.tensor_parallel import TensorParallelExecutor, gather
from bakehouse_replica.executors.watch import Watch
from bakehouse_replica.executors.worker import Follower
from bakehouse_replica.model.batch import FlatChunks
from bakehouse_replica.model.collective import Collective
from bakehouse_replica.model.sharding import Shard, local_spec
from executors import CAPACITY, PROMPT, chunk_of, cpu_ops, random_model, run, sample_at
from ranks import ThreadRanks, leader_of, part_of

pytestmark = pytest.mark.usefixtures("nothing_hangs")
# Also for how long, twice over, an operation hangs that a rank has left: see `nothing_hangs`.
TIMEOUT_S = 3.0
# The limit itself, and what busy cores add.
NAMED_WITHIN_S = 10 * TIMEOUT_S
CHUNK = chunk_of(PROMPT, sample=sample_at(0))


def own_part(collective: Collective) -> InProcessExecutor:
    spec, weights = random_model()
    shard = Shard(collective.rank, collective.size)
    return build_executor(
        spec=local_spec(spec, shard),
        weights=part_of(weights, spec, shard),
        ops=cpu_ops(),
        capacity=CAPACITY,
        collective=collective,
    )


@dataclass
class Errant:
    """One rank does `misbehave` in place of its step `at`; all other steps are done as ordered."""

    inner: Follower
    at: int
    misbehave: Callable[[], None]
    n_steps: int = 0

    def follow(self, copies: tuple[BlockCopy, ...], flat: FlatChunks | None) -> None:
        self.n_steps += 1
        if self.n_steps == self.at:
            self.misbehave()
        else:
            self.inner.follow(copies, flat)


@contextmanager
def errant(
    misbehave: Callable[[], None],
    *,
    rank: int = 1,
    size: int = 2,
    at: int = 3,
) -> Iterator[TensorParallelExecutor]:
    def load(collective: Collective) -> Follower:
        part = own_part(collective)
        return Errant(part, at, misbehave) if collective.rank == rank else part

    cpu_ops()  # compiled before any limit is set
    executor = gather(leader_of(size, load, TIMEOUT_S), own_part)
    try:
        yield executor
    finally:
        executor.close()


def loss_of(executor: Executor) -> BakehouseError:
    """What the third step raises."""
    run(executor, CHUNK)
    run(executor, CHUNK)
    begun_s = time.monotonic()
    with pytest.raises(RankLost) as lost:
        run(executor, CHUNK)
    assert time.monotonic() - begun_s < NAMED_WITHIN_S
    return lost.value


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (1, 4), (3, 4)])
def test_a_rank_that_skips_a_step_is_named_within_the_time_limit(rank: int, size: int) -> None:
    with errant(lambda: None, rank=rank, size=size) as executor:
        assert loss_of(executor).message == f"rank {rank} has not taken part in step 3 for 3 s"


def test_of_two_steps_in_flight_the_second_is_expected_to_get_on_when_the_first_has_ended() -> None:
    watch = Watch([], timeout_s=1.0, n_begun=lambda: 5, on_loss=lambda _: None)
    watch.step_begins(1)
    watch.step_begins(2)
    watch.step_ends()
    assert watch._judge_progress(10.0) is None
    assert str(watch._judge_progress(12.0)) == "no rank has got on in step 2 for 1 s"
    watch.step_ends()
    assert watch._judge_progress(14.0) is None


def test_a_rank_that_fails_is_named_at_once_with_its_error() -> None:
    def misbehave() -> None:
        raise MemoryError("no room for keys")

    with errant(misbehave, rank=2, size=4) as executor:
        assert loss_of(executor).message == "rank 2 has failed: MemoryError: no room for keys"


def test_a_rank_whose_count_of_steps_differs_is_named_at_once() -> None:
    with errant(lambda: None, at=99) as executor:
        run(executor, CHUNK)
        leader = executor._leader
        leader._number += 1  # as if an order had been lost on its way
        with pytest.raises(RankLost, match="rank 1 has failed: step 3 came where step 2 was expected"):
            run(executor, CHUNK)


def test_a_damaged_order_is_refused_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    with errant(lambda: None, at=99) as executor:
        run(executor, CHUNK)
        (link,) = executor._leader._links
        garbler = _Garbler(link.orders)
        monkeypatch.setattr(executor._leader, "_links", [_GarbledLink(garbler, link.reports)])
        with pytest.raises(RankLost, match="rank 1 has failed: the digest of step 2 is"):
            run(executor, CHUNK)
        monkeypatch.undo()


@dataclass
class _Garbler:
    inner: socket.socket

    def sendall(self, words: memoryview) -> None:
        damaged = bytearray(words)
        damaged[-1] ^= 1
        self.inner.sendall(damaged)

    def shutdown(self, how: int) -> None:
        self.inner.shutdown(how)


@dataclass
class _GarbledLink:
    orders: _Garbler
    reports: socket.socket


def test_idle_hours_cost_no_rank_and_the_next_step_runs() -> None:
    with errant(lambda: None, at=99) as executor:
        first = run(executor, CHUNK)
        threading.Event().wait(2 * TIMEOUT_S)  # hours are no different
        assert run(executor, CHUNK).sampled == first.sampled


@dataclass
class _Told:
    losses: list[BakehouseError] = field(default_factory=list)
    has_come: threading.Event = field(default_factory=threading.Event)

    def take(self, loss: BakehouseError) -> None:
        self.losses.append(loss)
        self.has_come.set()


def test_a_rank_that_is_lost_in_idle_hours_is_told_without_a_step() -> None:
    def load(collective: Collective) -> Follower:
        return own_part(collective)

    executor = gather(leader_of(2, load, TIMEOUT_S), own_part)
    told = _Told()
    executor.tell_of_loss(told.take)
    executor._leader._links[0].reports.shutdown(socket.SHUT_RD)  # what a dead process's connection reads as
    assert told.has_come.wait(NAMED_WITHIN_S)
    assert told.losses[0].message == "rank 1 has died"
    executor.close()


def test_a_rank_that_cannot_start_is_named_with_its_reason() -> None:
    def load(collective: Collective) -> Follower:
        raise StartupError("too little memory: 3 MiB")

    with pytest.raises(StartupError, match="rank 1: too little memory: 3 MiB"):
        gather(leader_of(2, load, TIMEOUT_S), own_part)


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    reception = Reception("127.0.0.1", b"s" * 32)
    invitation = Invitation(
        host="127.0.0.1", port=reception.port, store_port=0, size=2, timeout_s=1.0, secret=b"t" * 32
    )
    stranger, silent = join(invitation, 1), socket.create_connection(("127.0.0.1", reception.port))
    silent.close()
    n_checks = 0

    def check() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks > len(Channel) + 2:
            raise StartupError("nobody else comes")

    with pytest.raises(StartupError, match="nobody else comes"):
        reception.welcome(2, check)
    assert stranger.orders.recv(1) == b""
    stranger.close()
    reception.close()


def test_ranks_end_with_rank_0() -> None:
    started: list[ThreadRanks] = []
    executor = gather(leader_of(3, own_part), own_part)
    ranks = executor._leader._ranks
    assert isinstance(ranks, ThreadRanks)
    started.append(ranks)
    executor.close()
    executor.close()
    assert not any(thread.is_alive() for thread in started[0]._threads)
