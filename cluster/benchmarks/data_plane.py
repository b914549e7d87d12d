"""What a token costs between replica and gateway: a streaming call per request beside one subscription for all.

A real Serve with one replica on the fake executor, paced at a token per stream every 8 ms, and one consumer in the
place of a gateway that reads deltas and does nothing with them. Prints, for each client and number of streams,
messages per second through Ray, tokens per second, and CPU milliseconds per token of both processes; the last
column leaves out what the engine alone spends on a token, measured before. Flags are those of replica and
consumer, as `bakehouse_cluster.app` gives them; each set has a Ray of its own.

PYTHONPATH=cluster:replica:kernels:router .venv/bin/python cluster/benchmarks/data_plane.py [FLAGS ...]
"""

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Literal

import psutil
import ray
from bakehouse_cluster.app import ONE_LOOP
from bakehouse_replica.actor import ReplicaActor
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Delivery, Request
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_router.ray_client import KvAwareRouter, RayCalls
from bakehouse_router.streaming_client import StreamingClient
from bakehouse_router.subscription_client import SubscriptionClient
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

FLAGS: dict[str, dict[str, str]] = {
    "off": {},
    "one loop": ONE_LOOP,  # as `bakehouse serve` does
    "throughput": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
}
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_WAIT_POLICY": "passive"}
ClientKind = Literal["streaming", "subscription"]
CLIENTS: tuple[ClientKind, ...] = ("streaming", "subscription")
STREAMS = (1, 32, 256)
STEP_S = 0.008
MEASURED_S = 2.5
N_PROMPT = 16
MAX_TOKENS = 1500  # more than anybody gets to
OBJECT_STORE_BYTES = 100_000_000
SETTINGS = ReplicaSettings(executor="fake", fake_step_s=STEP_S, max_sequences=max(STREAMS), max_step_tokens=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One measurement; rates per second, CPU in milliseconds per token."""

    messages: float
    tokens: float
    gateway_ms: float
    replica_ms: float


def _requests(kind: str, n_streams: int) -> list[Request]:
    return [
        Request(
            request_id=f"{kind}-{n_streams}-{index}-{time.monotonic_ns()}",
            prompt_ids=(index + 1, *range(1, N_PROMPT)),
            params=SamplingParams(temperature=0.0, seed=index, max_tokens=MAX_TOKENS),
        )
        for index in range(n_streams)
    ]


class Load:
    """Streams that are read, and counts of what they bring."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.n_deliveries = 0
        self.n_begun = 0

    async def read(self, stream: AsyncGenerator[Delivery, None]) -> None:
        async with aclosing(stream):
            is_first = True
            async for delivery in stream:
                self.n_begun += is_first
                is_first = False
                self.n_deliveries += 1
                self.n_tokens += sum(len(delta.token_ids) for delta in delivery.deltas)

    async def run(self, streams: list[AsyncGenerator[Delivery, None]]) -> list[asyncio.Task[None]]:
        """Begin to read all of them, and return when each has brought something."""
        readers = [asyncio.create_task(self.read(stream)) for stream in streams]
        while self.n_begun < len(readers):
            await asyncio.sleep(0.05)
        return readers


class Consumer:
    """What a gateway does with its replica client, and nothing else."""

    def __init__(self, replicas: DeploymentHandle[object]) -> None:
        calls = RayCalls(replicas)
        self._streaming = StreamingClient(calls, status_period_s=0.5)
        self._subscription = SubscriptionClient(calls, status_period_s=0.5)

    async def begin(self) -> None:
        """Returns when the replica is known and subscribed to."""
        self._streaming.start()
        self._subscription.start()
        while not await self._subscription.statuses():
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    async def measure(self, kind: ClientKind, n_streams: int, replica_pid: int) -> Reading:
        """Reads so many streams at once for a while."""
        client = self._streaming if kind == "streaming" else self._subscription
        load, replica = Load(), psutil.Process(replica_pid)
        readers = await load.run([client.generate(request) for request in _requests(kind, n_streams)])
        before = (
            time.monotonic(),
            time.process_time(),
            _cpu_s(replica),
            self._n_messages(kind, load),
            load.n_tokens,
        )
        await asyncio.sleep(MEASURED_S)
        after = (
            time.monotonic(),
            time.process_time(),
            _cpu_s(replica),
            self._n_messages(kind, load),
            load.n_tokens,
        )
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        elapsed_s, gateway_s, replica_s, n_messages, n_tokens = (
            late - early for early, late in zip(before, after, strict=True)
        )
        return Reading(
            messages=n_messages / elapsed_s,
            tokens=n_tokens / elapsed_s,
            gateway_ms=1e3 * gateway_s / n_tokens,
            replica_ms=1e3 * replica_s / n_tokens,
        )

    def _n_messages(self, kind: ClientKind, load: Load) -> int:
        if kind == "streaming":
            return load.n_deliveries
        return sum(self._subscription._subscriptions.received().n_messages.values())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def _engine_alone(n_streams: int) -> float:
    """CPU milliseconds a token of an engine whose streams are read in its own process."""
    engine = build_engine(SETTINGS, replica_id="alone")
    engine.start()
    load = Load()
    readers = await load.run([engine.generate(request) for request in _requests("alone", n_streams)])
    begun_s, n_before = time.process_time(), load.n_tokens
    await asyncio.sleep(MEASURED_S)
    spent_ms = 1e3 * (time.process_time() - begun_s) / (load.n_tokens - n_before)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await engine.close()
    return spent_ms


class MeasuredReplica(ReplicaActor):
    """A replica that says which process it is."""

    async def pid(self) -> int:
        return os.getpid()


async def _measure_all(flags: dict[str, str]) -> None:
    """Prints the lines of one set of flags."""
    runtime_env = {"env_vars": flags}
    replica = serve.deployment(
        name="Replica",
        max_ongoing_requests=4096,
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": KvAwareRouter}),
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_cpus": 0.5, "runtime_env": runtime_env},
    )(MeasuredReplica)
    consumer = serve.deployment(name="Consumer", ray_actor_options={"num_cpus": 0.1, "runtime_env": runtime_env})(
        Consumer
    )
    handle = serve.run(consumer.bind(replica.bind(SETTINGS)), name="data-plane", route_prefix=None)
    pid = await serve.get_deployment_handle("Replica", "data-plane").pid.remote()
    await handle.begin.remote()
    for n_streams in STREAMS:
        alone_ms = await _engine_alone(n_streams)
        for kind in CLIENTS:
            reading = await handle.measure.remote(kind, n_streams, pid)
            print(json.dumps({"client": kind, "streams": n_streams, "alone_ms": alone_ms, **asdict(reading)}))


def _run_child(flags: dict[str, str]) -> None:
    folder = tempfile.mkdtemp(prefix="bh", dir="/tmp")  # short: socket paths end at 107 characters
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
    )
    try:
        asyncio.run(_measure_all(flags))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main(names: list[str]) -> None:
    """Prints a table of these sets of flags, of all where none is named."""
    print(
        "flags       client        streams  messages/s  tokens/s  gateway  replica  CPU ms/token  without engine"
    )
    for name in names or FLAGS:
        said = subprocess.run(
            [sys.executable, __file__, "child", name],
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            text=True,
        ).stdout
        for line in filter(lambda line: line.startswith("{"), said.splitlines()):
            row = json.loads(line)
            total_ms = row["gateway_ms"] + row["replica_ms"]
            print(
                f"{name:11} {row['client']:13} {row['streams']:7} {row['messages']:11,.0f} {row['tokens']:9,.0f} "
                f"{row['gateway_ms']:8.3f} {row['replica_ms']:8.3f} {total_ms:13.3f} "
                f"{total_ms - row['alone_ms']:15.3f}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        _run_child(FLAGS[sys.argv[2]])
    else:
        main(sys.argv[1:])
