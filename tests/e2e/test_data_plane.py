"""Subscriptions over a real Serve: what comes by them, and what is left when either side goes."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
import ray
import ray.cloudpickle
from bakehouse_replica.actor import ReplicaActor
from bakehouse_replica.core.errors import EngineDead
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Delivery, Request
from bakehouse_replica.outbox import SILENT_S
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_router.ray_client import KvAwareRouter, RayCalls
from bakehouse_router.subscription_client import SubscriptionClient
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WAIT_S = 120.0
POLL_S = 0.05
GRACE_S = 60.0
SETTINGS = ReplicaSettings(executor="fake", fake_step_s=0.01)
Handle = DeploymentHandle[object]


class PidReplica(ReplicaActor):
    """A replica that says which process it is."""

    async def pid(self) -> int:
        return os.getpid()


class Gateway:
    """A gateway in a process of its own, without text."""

    def __init__(self, handle: Handle) -> None:
        self._client = SubscriptionClient(RayCalls(handle), status_period_s=0.1)

    async def begin_streams(self, n_streams: int) -> int:
        """Subscribes, lets streams run that nobody reads on, and says which process it is."""
        await subscribed(self._client)
        self._streams = [self._client.generate(request(f"lost-{index}", 4000)) for index in range(n_streams)]
        await asyncio.gather(*(anext(stream) for stream in self._streams))
        return os.getpid()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    # Ray's workers cannot import a test.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    folder = tempfile.mkdtemp(prefix="bh", dir="/tmp")  # short: socket paths end at 107 characters
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    yield
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def replica(local_ray: None) -> Iterator[Handle]:
    """One replica; whoever has used it must have let go of it within the test."""
    deployment = serve.deployment(
        name="Replica",
        ray_actor_options={"num_cpus": 0.5},
        max_ongoing_requests=100,
        health_check_period_s=1,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=GRACE_S,
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": KvAwareRouter}),
    )(PidReplica)
    yield serve.run(deployment.bind(SETTINGS), name="data-plane", route_prefix=None)
    serve.delete("data-plane")


def request(name: str, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
    return Request(request_id=f"{name}-{time.monotonic_ns()}", prompt_ids=(1, 2, 3), params=params)


async def subscribed(client: SubscriptionClient) -> None:
    """Returns when a message has come by subscription."""
    client.start()
    async with asyncio.timeout(WAIT_S):
        while not sum(client._subscriptions.received().n_messages.values()):
            await collected(client, request("first", 1))
            await asyncio.sleep(POLL_S)


async def collected(client: SubscriptionClient, wanted: Request) -> list[Delivery]:
    return [delivery async for delivery in client.generate(wanted)]


async def n_running(handle: Handle) -> int:
    status = await handle.status.remote()
    n_alive: int = status.load.n_running + status.load.n_waiting
    return n_alive


async def test_streams_share_messages_and_a_drain_does_not_wait_for_the_subscription(replica: Handle) -> None:
    client = SubscriptionClient(RayCalls(replica), status_period_s=0.1)
    await subscribed(client)
    (before,) = client._subscriptions.received().n_messages.values()
    crowd = await asyncio.gather(*(collected(client, request("crowd", 50)) for _ in range(16)))
    (after,) = client._subscriptions.received().n_messages.values()

    for deliveries in crowd:
        assert sum(len(delta.token_ids) for delivery in deliveries for delta in delivery.deltas) == 50
    assert after - before < 2 * 50

    begun_s = time.monotonic()
    await asyncio.to_thread(serve.delete, "data-plane")
    assert time.monotonic() - begun_s < GRACE_S / 2
    await client.close()


async def test_a_killed_replica_fails_each_stream_once_and_its_successor_is_subscribed_to(replica: Handle) -> None:
    client = SubscriptionClient(RayCalls(replica), status_period_s=0.1)
    await subscribed(client)
    streams = [client.generate(request("lost", 4000)) for _ in range(8)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    os.kill(await replica.pid.remote(), signal.SIGKILL)

    async def end_of(stream: object) -> BaseException | None:
        try:
            async for _ in stream:  # type: ignore[attr-defined]
                pass
        except EngineDead as error:
            return error
        return None

    async with asyncio.timeout(WAIT_S):
        errors = await asyncio.gather(*map(end_of, streams))
        assert all(isinstance(error, EngineDead) for error in errors), errors
        deliveries = await collected(client, request("after", 5))
        assert sum(len(delta.token_ids) for each in deliveries for delta in each.deltas) == 5
        while not sum(client._subscriptions.received().n_messages.values()):
            await collected(client, request("again", 1))
            await asyncio.sleep(POLL_S)
    await client.close()


async def test_a_killed_gateway_leaves_nothing_running(replica: Handle) -> None:
    gateway = ray.remote(num_cpus=0.1)(Gateway).remote(replica)
    pid = await gateway.begin_streams.remote(8)  # type: ignore[attr-defined]
    async with asyncio.timeout(WAIT_S):
        while await n_running(replica) < 8:  # a snapshot, some 10 ms old
            await asyncio.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)

    async with asyncio.timeout(2 * SILENT_S):  # 4000 tokens take 40 s
        while await n_running(replica):
            await asyncio.sleep(POLL_S)
    begun_s = time.monotonic()
    await asyncio.to_thread(serve.delete, "data-plane")
    assert time.monotonic() - begun_s < GRACE_S / 2
