"""`bakehouse serve`: checks, starts, announces, waits and drains one local server."""

import json
import os
import shlex
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.source import open_source

from bakehouse_cluster.capturing import captures_told
from bakehouse_cluster.checks import check_before_start, check_model, is_loopback
from bakehouse_cluster.compiling import compiling_told
from bakehouse_cluster.config import Config
from bakehouse_cluster.local_ray import LocalRay
from bakehouse_cluster.ports import LOOPBACK
from bakehouse_cluster.progress import Stages, n_of
from bakehouse_cluster.serve_config import tracing, tracing_environment
from bakehouse_cluster.serve_environment import MIN_GRPC_BYTES, LocalRaySettings

EXAMPLE = "What is the capital of France?"
READY_POLL_S = 0.1
# From "all replicas run" to the first answer of `/ready`: the gateway has to hear of them and probes the model.
READY_TIMEOUT_S = 60.0
# Ray ends the processes of what has been drained, or of what has not been in time.
DRAIN_GRACE_S = 5.0
WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "[::1]"}


def serve(config: Config, stages: Stages) -> int:
    """Serve until interrupted; the exit status. Raises `StartupError` where it cannot be served as asked,
    `Unavailable` where Ray dies.

    The first interrupt (or SIGTERM) lets running requests end, for at most `server.drain_s`; the second ends all
    at once.
    """
    n_cpus = usable_cpus()
    config = config.shared_out(n_cpus)
    check_before_start(config)
    with stages.stage(f"model {config.model.source}"):
        files = open_source(config.source)
        check_model(config, files)
    ray = LocalRay(
        LocalRaySettings(
            host=config.server.host,
            port=config.server.port,
            grpc_port=config.server.grpc_port,
            ingress=config.server.ingress,
            # A request that is over the limit, but not far, is still told so.
            max_grpc_bytes=max(MIN_GRPC_BYTES, 2 * config.gateway.max_body),
            n_cpus=n_cpus,
            object_store_bytes=config.server.object_store,
            tracing=tracing(config.tracing),
            variables=tracing_environment(config.tracing),
        )
    )
    interrupts = _Interrupts(ray.kill, stages.abandon)
    interrupts.install()
    try:
        with ray:
            with stages.stage("Ray, in a private folder"):
                ray.start(take_signals=interrupts.install)
            _serve_until_interrupted(config, ray, stages, files.cache_dir)
    except KeyboardInterrupt:  # before anything was deployed: there was nothing to drain
        stages.note("stopped before anything was served; nothing is left running")
        return interrupts.exit_status
    return 0


def usable_cpus() -> int:
    """The CPUs that this process may use: a container or `taskset` may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Interrupts:
    """SIGINT and SIGTERM: the first raises `KeyboardInterrupt` in the main thread, the second ends the process."""

    def __init__(self, *on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self._signal: int | None = None

    @property
    def exit_status(self) -> int:
        """The shell's convention for a process that a signal ended."""
        assert self._signal is not None, "asked only after an interrupt"
        return 128 + self._signal

    def install(self) -> None:
        """Take both signals, also back from whoever took them since the last call."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first, self._signal = self._signal is None, number
        if is_first:
            raise KeyboardInterrupt
        for act in self._on_second:
            act()
        os._exit(self.exit_status)


def _serve_until_interrupted(config: Config, ray: LocalRay, stages: Stages, cache_dir: Path) -> None:
    """Drains also where the interrupt comes early: the gateway answers before the last replica has started."""
    try:
        _deploy(config, ray, stages, cache_dir)
        ray.wait_until_lost()
    except KeyboardInterrupt:
        label = f"draining, at most {config.server.drain_s:.0f} s; Ctrl-C again ends at once"
        with stages.stage(label, done="drained"):
            is_drained = ray.drain(config.server.drain_s + DRAIN_GRACE_S)
            if not is_drained:
                stages.note("not everything has ended; the rest is ended now")


def _deploy(config: Config, ray: LocalRay, stages: Stages, cache_dir: Path) -> None:
    with (
        stages.stage(n_of(config.n_replicas, "replica")),
        compiling_told(stages.note),
        captures_told(stages.note, cache_dir),
    ):
        from bakehouse_cluster.app import build  # imports Serve, which reads the environment that `start` has set

        ray.deploy(build(config))
        replicas = _wait_until_ready(_url(config))
    _announce(config, ray, stages, replicas)


def _wait_until_ready(url: str) -> Sequence[Mapping[str, int]]:
    """The replicas as `/health` describes them, once `/ready` has answered 200."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback
    while True:
        try:
            with direct.open(f"{url}/ready", timeout=READY_TIMEOUT_S):
                break
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline_s:
                raise StartupError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s: {error}") from error
        time.sleep(READY_POLL_S)
    with direct.open(f"{url}/health", timeout=READY_TIMEOUT_S) as answer:
        replicas: Sequence[Mapping[str, int]] = json.load(answer)["replicas"]
    return replicas


def _announce(config: Config, ray: LocalRay, stages: Stages, replicas: Sequence[Mapping[str, int]]) -> None:
    """Where it listens, how to try it, and what it may use at most."""
    url, server = _url(config), config.server
    messages = [{"role": "user", "content": EXAMPLE}]
    body = json.dumps({"model": config.served_name, "temperature": 0, "messages": messages})
    n_tokens = replicas[0]["n_blocks"] * replicas[0]["block_size"]
    stages.note(f"\nServing {config.served_name} at {url}\n")
    stages.note(f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n")
    if server.grpc_port is not None:
        stages.note(f"  gRPC       {url.removeprefix('http://').rpartition(':')[0]}:{server.grpc_port}")
    stages.note(f"  dashboard  {ray.dashboard_address} (token: {ray.token_path})")
    stages.note(f"  Python     {_environment(ray)} python your_program.py")
    stages.note(f"  logs       {ray.log_folder}")
    stages.note(f"  metrics    {shell_name(sys.argv[0])} monitor --session {shlex.quote(str(ray.folder))}")
    stages.note(
        f"  memory     KV cache {replicas[0]['kv_bytes'] / 2**20:,.0f} MiB ({n_tokens:,} tokens) a replica, "
        f"{_replicas(config)}; "
        f"Ray's object store at most {server.object_store / 2**20:.0f} MiB"
    )
    if (server.ingress == "haproxy" or not is_loopback(server.host)) and config.gateway.keys is None:
        stages.note("  WARNING    this server can be reached from outside, and nobody is asked for a key")
    stages.note("\nCtrl-C ends it.")


def shell_name(program: str) -> str:
    """How a shell in any folder starts the program that `sys.argv[0]` says has been started."""
    path = Path(program)
    if path.suffix == ".py":  # by `python -m`
        return f"{shlex.quote(sys.executable)} -m bakehouse_cluster.cli"
    found = shutil.which(path.name)
    if found is not None and path.exists() and os.path.samefile(found, path):
        return path.name
    return shlex.quote(str(path.absolute()))


def _replicas(config: Config) -> str:
    if config.n_replicas == config.max_replicas:
        return n_of(config.n_replicas, "replica")
    return f"{config.n_replicas} to {n_of(config.max_replicas, 'replica')}"


def _environment(ray: LocalRay) -> str:
    """What a shell says before a program that joins this Ray."""
    token_path = shlex.quote(str(ray.token_path))
    return f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token_path} RAY_ADDRESS={ray.address}"


def _url(config: Config) -> str:
    host = WILDCARDS.get(config.server.host, config.server.host)
    return f"http://{host}:{config.server.port}"
