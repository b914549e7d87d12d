"""The executor whose model is shared by several ranks; this process is rank 0, which plans, draws and answers.

Rank 0 starts the others by whatever `StartRanks` it is given and waits for them, all load their parts, and then
each step is an order that goes out before rank 0 begins its own part. On devices that is when the step is begun,
and what the step before draws reaches all ranks there; on hosts it is when the step's turn comes.

A `Watch` looks after the ranks: where one is lost so is the replica, with an error that names it, be it in a step
or in idle hours.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from bakehouse_replica.core.errors import BakehouseError, StartupError
from bakehouse_replica.core.executor import Executor, Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, StepPlan, StepResult
from bakehouse_replica.executors.control import StepOrder, encode
from bakehouse_replica.executors.device_choice import device_of
from bakehouse_replica.executors.host_steps import HostSteps
from bakehouse_replica.executors.links import (
    SECRET_BYTES,
    STEP_LIMITS,
    Invitation,
    Link,
    Reception,
    hang_up,
    send_order,
)
from bakehouse_replica.executors.local_ranks import LocalRanks, Ranks, StartRanks
from bakehouse_replica.executors.watch import Watch
from bakehouse_replica.model.batch import flatten
from bakehouse_replica.model.collective import Collective, CollectiveError, Group, Meeting, open_store
from bakehouse_replica.settings import ReplicaSettings

LOOPBACK = "127.0.0.1"


class OwnPart(Executor, Protocol):
    """What carries out rank 0's part."""

    @property
    def takes_placeholders(self) -> bool:
        """Whether the other ranks need no word from the host of what the step before has drawn."""
        ...


LoadOwn = Callable[[Collective], OwnPart]
OnLoss = Callable[[BakehouseError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """Where ranks run: what starts them, and the address at which they reach this process.

    `on_loss` is told, as the engine is, when one is lost.
    """

    start: StartRanks = LocalRanks
    host: str = LOOPBACK
    on_loss: Callable[[str], None] | None = None


class Leader:
    """Rank 0's side of the connections to all others."""

    def __init__(
        self,
        *,
        host: str,
        size: int,
        timeout_s: float,
        device: torch.device,
        start: Callable[[Invitation], Ranks],
    ) -> None:
        """Returns once all ranks have joined; raises `StartupError` where one cannot."""
        self._on_loss: OnLoss | None = None
        self._number = 0
        self.timeout_s = timeout_s
        secret = secrets.token_bytes(SECRET_BYTES)
        reception = Reception(host, secret)
        store, store_port = open_store(host, size)
        invitation = Invitation(
            host=host, port=reception.port, store_port=store_port, size=size, timeout_s=timeout_s, secret=secret
        )
        try:
            self._ranks = start(invitation)
            self._links = _welcomed(reception, size, self._ranks)
        finally:
            reception.close()
        self.watch = Watch(
            [link.reports for link in self._links],
            timeout_s=timeout_s,
            n_begun=lambda: self._collective.n_begun if self._collective is not None else 0,
            on_loss=self._lose,
        )
        self._collective: Group | None = None
        self.watch.start()
        meeting = Meeting(rank=0, size=size, host=host, port=store_port, own_host=host)
        try:
            self._collective = Group(meeting, device, self.watch.check, store)
        except BaseException:
            self.close()
            raise

    @property
    def collective(self) -> Collective:
        """The way to the others within a step."""
        assert self._collective is not None, "made by the constructor"
        return self._collective

    def order(self, plan: StepPlan) -> None:
        """Let the others begin their part of the step. Raises what `watch` knows where one is lost."""
        self.watch.check()
        self._number += 1
        flat = flatten(plan.chunks) if plan.chunks else None
        words = encode(StepOrder(number=self._number, copies=plan.copies, flat=flat))
        self.watch.step_begins(self._number)
        try:
            for link in self._links:
                send_order(link.orders, words)
        except OSError as error:
            raise self.watch.explain(error) from error

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """An error within raises what `watch` knows, where a rank is lost: also where it shows in another way.

        So does the end, where operations of a device have been aborted.
        """
        try:
            yield
        except CollectiveError as error:
            raise self.watch.explain(error) from error
        except Exception as error:
            if self.watch.loss is not None:
                raise self.watch.loss from error
            raise
        self.watch.check()

    def tell_of_loss(self, on_loss: OnLoss) -> None:
        """`on_loss` is called, perhaps twice, in any thread, when a rank is lost, or has been already."""
        self._on_loss = on_loss
        if self.watch.loss is not None:
            on_loss(self.watch.loss)

    def close(self) -> None:
        """Let the ranks go, and end them; idempotent."""
        self.watch.close()
        for link in self._links:
            link.close()
        self._ranks.end()

    def _lose(self, loss: BakehouseError) -> None:
        for link in self._links:
            hang_up(link.orders)  # rank 0 may be sending to a rank that takes nothing any more
        if self._on_loss is not None:
            self._on_loss(loss)
        if self._collective is not None:
            self._collective.abort()


def _welcomed(reception: Reception, size: int, ranks: Ranks) -> list[Link]:
    try:
        return reception.welcome(size, ranks.check)
    except BaseException:
        ranks.end()
        raise


class TensorParallelExecutor:
    """Carries out plans together with the ranks that `leader` has gathered; `own` is rank 0's part."""

    def __init__(self, own: OwnPart, leader: Leader) -> None:
        self._own = own
        self._leader = leader
        self._steps = HostSteps(self._carry_out, own.capacity.max_flights)

    @property
    def capacity(self) -> Capacity:
        """What every rank can hold; `block_bytes` are those of all ranks together."""
        return self._own.capacity

    def tell_of_loss(self, on_loss: OnLoss) -> None:
        """See `Leader.tell_of_loss`."""
        self._leader.tell_of_loss(on_loss)

    def prepare(self, params: SamplingParams) -> None:
        """Only rank 0 draws."""
        self._own.prepare(params)

    def begin(self, plan: StepPlan) -> Pending:
        """One step of all ranks. It or its result raises `RankLost`, which names the rank, where one is lost."""
        return self._begin(plan) if self._own.takes_placeholders else self._steps.begin(plan)

    def close(self) -> None:
        """Ends the other ranks; lets go of weights and cache."""
        self._leader.close()
        self._own.close()

    def _begin(self, plan: StepPlan) -> "_SharedStep":
        self._leader.order(plan)
        with self._leader.explaining():
            return _SharedStep(self._own.begin(plan), self._leader)

    def _carry_out(self, plan: StepPlan, begun_at: float) -> StepResult:
        return self._begin(plan).result()


@dataclass(frozen=True, slots=True, eq=False)
class _SharedStep:
    """A step that all ranks have been ordered to do."""

    own: Pending
    leader: Leader

    def result(self) -> StepResult:
        """Rank 0's."""
        with self.leader.explaining():
            result = self.own.result()
        self.leader.watch.step_ends()
        return result


def lead(settings: ReplicaSettings, places: RankPlaces) -> Leader:
    """Rank 0's side of a replica with these settings, once all ranks have joined: all on its kind of device."""
    device = device_of(settings)
    theirs = replace(settings, device="cuda" if device.type == "cuda" else "cpu")
    return Leader(
        host=places.host,
        size=settings.tensor_parallel,
        timeout_s=settings.rank_timeout_s,
        device=device,
        start=lambda invitation: places.start(theirs, invitation),
    )


def gather(leader: Leader, load_own: LoadOwn) -> TensorParallelExecutor:
    """Rank 0 loads its part while the others load theirs. Raises `StartupError` where one of them cannot."""
    try:
        executor = TensorParallelExecutor(load_own(leader.collective), leader)
        leader.collective.limit(STEP_LIMITS * leader.timeout_s)
        return executor
    except CollectiveError as error:
        loss = leader.watch.explain(error)
        leader.close()
        raise StartupError(str(loss)) from error
    except BaseException:
        leader.close()
        raise
