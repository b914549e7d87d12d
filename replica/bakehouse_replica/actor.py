"""One replica as Ray Serve sees it: builds the engine and forwards to it.

Serve counts a call as ongoing until its generator ends: each request once, and each gateway that is subscribed
once more. Who scales by ongoing calls leaves room for the gateways; a drain waits for a subscription until its
gateway closes it, which it does once none of its requests is left here.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, cast

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bakehouse_replica.core.errors import ConfigError, EngineDead, StartupError
from bakehouse_replica.core.metric_table import METRICS, Source
from bakehouse_replica.core.step_message import Receipt, Received, ReturnAddress, StepMessage, Subscribe
from bakehouse_replica.core.story import ToldStory
from bakehouse_replica.core.types import Delivery, ReplicaStatus, Request
from bakehouse_replica.core.vllm_table import VLLM_METRICS
from bakehouse_replica.core.wire import WireValue, card_to_wire, load_to_wire
from bakehouse_replica.engine import Engine
from bakehouse_replica.logs import write_to_serve_log
from bakehouse_replica.ray_metrics import RayMetrics, log_end, push_for_ever
from bakehouse_replica.service import ReplicaService
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import SCRIPT_PREFIX

if TYPE_CHECKING:
    from bakehouse_replica.executors.links import Invitation

logger = logging.getLogger(__name__)

# Open streams have been told by then; their last messages need an event loop's turn and a trip to the gateway.
EXIT_GRACE_S = 1.0
# Where a rank is lost and the engine hangs in a step for it, so that nobody can be told.
LOSS_GRACE_S = 10.0


class ReplicaActor:
    """An engine behind Ray; `bakehouse_cluster.app` makes a Serve deployment of it.

    A replica whose engine has failed tells its streams and ends its process: Serve notices the death of a
    process in milliseconds where streams run, and starts another one. One whose engine hangs in a step cannot tell
    anybody, and just ends: Serve would stop one that is only unhealthy in order, and wait for its streams.
    """

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        write_to_serve_log("bakehouse_replica")
        replica_id = serve.get_replica_context().replica_id.unique_id
        # In a thread, as it takes minutes for a large model, and Serve's own calls may come on the same loop.
        self._step_timeout_s = settings.step_timeout_s
        self._engine = await asyncio.to_thread(_build_engine, settings, replica_id)
        self._service = ReplicaService(self._engine)
        self._engine.start()
        groups = _metrics(settings, self._engine)
        self._pushing = asyncio.create_task(push_for_ever(groups, lambda: self._engine.series))
        self._pushing.add_done_callback(log_end)
        self._has_started = False

    async def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Serve calls it once at the start, and whenever the deployment's `user_config` has changed.

        Raises `ConfigError` at the start only: later, Serve would end a replica for it, with all that it does.
        """
        try:
            self._service.reconfigure(user_config)
        except ConfigError as error:
            if not self._has_started:
                raise
            logger.error("the limits stay as they are: %s", error)

    async def generate(self, request: Request) -> AsyncGenerator[Delivery, None]:
        """See `ReplicaService.generate`."""
        async with aclosing(self._service.generate(request)) as deliveries:
            async for delivery in deliveries:
                yield delivery

    async def serve(self, request: Request, address: ReturnAddress) -> AsyncGenerator[Delivery | Receipt, None]:
        """See `ReplicaService.serve`."""
        async with aclosing(self._service.serve(request, address)) as items:
            async for item in items:
                yield item

    async def subscribe(self, subscribe: Subscribe) -> AsyncGenerator[StepMessage, None]:
        """See `ReplicaService.subscribe`."""
        async with aclosing(self._service.subscribe(subscribe)) as messages:
            async for message in messages:
                yield message

    async def status(self, received: Received | None = None) -> ReplicaStatus:
        """See `ReplicaService.status`."""
        return await self._service.status(received)

    async def explain(self, request_ids: Sequence[str]) -> tuple[ToldStory, ...]:
        """See `ReplicaService.explain`."""
        return await self._service.explain(request_ids)

    async def record_routing_stats(self) -> dict[str, WireValue]:
        """Serve polls this and sends it to every router."""
        status = await self.status()
        return load_to_wire(status.load, status.problem)

    async def record_replica_metadata(self) -> dict[str, WireValue]:
        """Serve asks once, when the replica is ready, and sends it to every router."""
        return card_to_wire((await self.status()).card)

    async def check_health(self) -> None:
        """Raises where this replica cannot serve any more; Serve then replaces it."""
        self._has_started = True  # Serve asks for the first time when it has configured the replica
        if self._engine.failure is not None:
            raise EngineDead(self._engine.failure)
        stall = self._engine.stall(self._step_timeout_s)
        if stall is not None:
            _exit_soon(stall)
            raise EngineDead(stall)


def _metrics(settings: ReplicaSettings, engine: Engine) -> list[RayMetrics]:
    own = RayMetrics(metric for metric in METRICS if metric.source is Source.REPLICA)
    if not settings.vllm_names:
        return [own]
    return [own, RayMetrics(VLLM_METRICS, {"model_name": engine.card.model_name})]


def _build_engine(settings: ReplicaSettings, replica_id: str) -> Engine:
    # Loads torch and numba, which a process that only deploys this class need not wait for.
    from bakehouse_replica.build import build_engine
    from bakehouse_replica.executors.tensor_parallel import RankPlaces

    node_id, nodes = ray.get_runtime_context().get_node_id(), ray.nodes()  # type: ignore[no-untyped-call]
    (on_node,) = [node["Resources"].get("GPU", 0.0) for node in nodes if node["NodeID"] == node_id]
    refuse_unreserved_gpus(settings, n_reserved=len(ray.get_gpu_ids()), n_on_node=on_node)
    places = RankPlaces(
        start=partial(RankActors, replica_id),
        host=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
        on_loss=partial(_exit_soon, grace_s=LOSS_GRACE_S),
    )
    return build_engine(settings, replica_id=replica_id, on_failure=_exit_soon, ranks=places)


def refuse_unreserved_gpus(settings: ReplicaSettings, *, n_reserved: int, n_on_node: float) -> None:
    """Raises `StartupError` where `auto` reserved no GPU, although Ray counts some on this replica's node.

    What a replica reserves is fixed when its application is built. Without a reservation it would share a GPU with
    whoever has reserved it, and on the CPU it would be slower by orders of magnitude without a word.
    """
    runs_model = settings.executor == "model" and not settings.source.model.startswith(SCRIPT_PREFIX)
    if settings.device == "auto" and runs_model and n_reserved == 0 and n_on_node > 0:
        raise StartupError(
            f"model.device: auto reserved no GPU, as there was none for replicas when the application was built; "
            f"this node has {n_on_node:g}. Say cuda, or cpu"
        )


class RankActor:
    """A rank other than 0 of a tensor-parallel replica, in a bundle of the replica's placement group."""

    @ray.method
    def run(self, settings: ReplicaSettings, invitation: "Invitation", rank: int) -> None:
        """Until rank 0 leaves."""
        # Loads torch and numba, as above.
        from bakehouse_replica.executors.worker import serve_rank

        logging.basicConfig(level=logging.INFO)
        serve_rank(settings, invitation, rank)


class RankActors:
    """Ranks 1, 2, … in bundles 1, 2, … of the placement group whose bundle 0 holds this actor.

    Where this process ends without a word, Ray ends them: it owns them, and Serve removes its placement group.
    """

    def __init__(self, replica_id: str, settings: ReplicaSettings, invitation: "Invitation") -> None:
        """Ray's dashboard lists them by names that say whose they are."""
        group = get_current_placement_group()
        assert group is not None, "the deployment asks for a bundle for each rank"
        self._actors = []
        for rank, bundle in enumerate(group.bundle_specs[1:], start=1):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
            name = f"rank {rank} of bakehouse replica {replica_id}"
            made = ray.remote(RankActor).options(name=name, scheduling_strategy=place, **options).remote()
            self._actors.append(cast("ActorHandle[RankActor]", made))
        self._runs: list[ray.ObjectRef[None]] = [
            actor.run.remote(settings, invitation, rank) for rank, actor in enumerate(self._actors, start=1)
        ]

    def check(self) -> None:
        """Raises where an actor cannot be started, or has died."""
        ended, _ = ray.wait(self._runs, timeout=0)
        for run in ended:
            rank = self._runs.index(run) + 1
            try:
                ray.get(run)
            except RayError as error:
                raise StartupError(f"rank {rank} could not be started: {error}") from error
            raise StartupError(f"rank {rank} has ended before it joined")

    def end(self) -> None:
        """At once: rank 0 has let go of them."""
        for actor in self._actors:
            ray.kill(actor)


def _exit_soon(reason: str, grace_s: float = EXIT_GRACE_S) -> None:
    logger.error("%s; this process ends in %.0f s", reason, grace_s)
    # os._exit: no interpreter shutdown, which waits for threads that may hang together with the engine.
    timer = threading.Timer(grace_s, os._exit, (1,))
    timer.daemon = True
    timer.start()
