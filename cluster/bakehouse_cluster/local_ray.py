"""A private Ray on this machine that is a good guest: loopback, own ports and folder, bounded, gone without trace.

Ray and Serve read their environment when they are imported, so this module sets it first and imports them inside
its functions; nothing that imports Serve may be imported before `LocalRay.start` has returned.
"""

import errno
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import psutil
from bakehouse_replica.core.errors import StartupError, Unavailable

from bakehouse_cluster.guard import end_all

if TYPE_CHECKING:
    from ray.serve import Application

logger = logging.getLogger(__name__)

APP_NAME = "bakehouse"
# A Unix socket's path holds 107 bytes on Linux and 103 on macOS; Ray appends "/ray/session_<date>_<time>_<pid>/
# sockets/plasma_store" to our folder, 70 bytes with a pid of seven digits.
MAX_FOLDER_BYTES = 103 - 70
LOOPBACK = "127.0.0.1"
# Holds what a reply can report of the longest prompts.
MIN_GRPC_BYTES = 64 * 1024 * 1024
# Without one of them there is no Ray; whatever else dies is started again, by Serve or by Ray.
VITAL_PROGRAMS = frozenset({"raylet", "gcs_server"})
LOST_POLL_S = 1.0
DRAIN_POLL_S = 0.1
GRPC_SERVICES = "bakehouse_router.grpc_ingress.add_services"
WORKER_HOOK = "bakehouse_cluster.worker_hook.confine_worker"
MIDDLEWARES = "bakehouse_router.serve_headers.middlewares"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRaySettings:
    """Where the gateway listens and what Ray may use; `n_cpus` is what Ray's scheduler may hand out.

    `grpc_port` None offers no gRPC. `max_grpc_bytes` bounds one message of it, either way.
    """

    host: str
    port: int
    grpc_port: int | None = None
    max_grpc_bytes: int = MIN_GRPC_BYTES
    n_cpus: int
    object_store_bytes: int


class LocalRay:
    """One Ray, from `start` to `close`; as a context manager it is closed, drained or not, at the end."""

    def __init__(self, settings: LocalRaySettings) -> None:
        self._settings = settings
        self._folder = _private_folder()
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "bakehouse_cluster.guard", str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C on the terminal must not reach it
        )
        self._vital: dict[psutil.Process, str] = {}
        self._has_ended = False
        self.dashboard_address: str | None = None
        self.address: str | None = None

    @property
    def log_folder(self) -> Path:
        """Where Ray and Serve write; removed by `close`."""
        return self._folder / "ray" / "session_latest" / "logs"

    @property
    def token_path(self) -> Path:
        """The file with the token that the dashboard asks for; only this user can enter its folder."""
        return self._folder / "token"

    def start(self) -> None:
        """Start Ray and Serve; raises `StartupError` where the machine refuses."""
        self.token_path.write_text(secrets.token_hex(32))
        os.environ.update(_environment(self._settings, self.token_path))
        import ray  # reads the environment set above
        from ray._private import worker
        from ray._private.parameter import RayParams

        logging.getLogger("ray").setLevel(logging.ERROR)
        # Of a program that dies it would print the last 20 lines of the log; `wait_until_lost` says it in one.
        vars(worker)["print_to_stdstream"] = lambda *_lines, **_options: None
        # `ray.init` has no argument for this port; its default is 52365 for every Ray of a machine.
        RayParams.__init__ = with_keyword(  # type: ignore[method-assign]
            RayParams.__init__, dashboard_agent_listen_port=0
        )
        try:
            context = ray.init(
                address="local",
                num_cpus=self._settings.n_cpus,
                object_store_memory=self._settings.object_store_bytes,
                include_dashboard=True,
                dashboard_host=LOOPBACK,
                dashboard_port=_free_port(),
                logging_level=logging.ERROR,
                log_to_driver=False,
                namespace="serve",
                runtime_env={"worker_process_setup_hook": WORKER_HOOK},
                _node_ip_address=LOOPBACK,
                _temp_dir=str(self._folder / "ray"),
            )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise StartupError(f"Ray did not start: {error}") from error
        children = [(child, child.name()) for child in psutil.Process().children()]
        self._vital = {child: name for child, name in children if name in VITAL_PROGRAMS}
        self.dashboard_address = f"http://{context.dashboard_url}"
        self.address = ray.get_runtime_context().gcs_address
        self._start_serve()

    def _start_serve(self) -> None:
        from ray import serve  # reads the environment set by `start`
        from ray.serve.config import HTTPOptions, gRPCOptions

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        offers_grpc = self._settings.grpc_port is not None
        # With direct ingress the gateway itself listens on the asked ports. Serve starts its proxy all the same;
        # it gets free ports on loopback unless all were asked for.
        serve.start(
            http_options=HTTPOptions(host=self._settings.host, port=0),
            grpc_options=gRPCOptions(
                port=_free_port(), grpc_servicer_functions=[GRPC_SERVICES] if offers_grpc else []
            ),
            proxy_location="HeadOnly",
        )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # `serve.start` has set it back to INFO

    def deploy(self, application: "Application") -> None:
        """Run the application and wait until all its replicas do.

        Raises `StartupError` with the reason that a replica gave.
        """
        from ray import serve  # reads the environment set by `start`

        try:
            serve.run(application, name=APP_NAME)
        except RuntimeError as error:
            statuses = serve.status().applications[APP_NAME].deployments
            raise StartupError(_reason(status.message for status in statuses.values())) from error

    def wait_until_lost(self) -> None:
        """Waits as long as Ray lives. Raises `Unavailable`, with nothing of Ray left, where it has died."""
        while (program := self._lost_program(timeout_s=LOST_POLL_S)) is None:
            pass
        self._end_dead()
        raise Unavailable(f"Ray is lost: its program {program} has ended, so nothing is served any more")

    def drain(self, timeout_s: float) -> bool:
        """Let running requests end, for as long as their deployments' `graceful_shutdown_timeout_s`.

        False where that has not happened within `timeout_s`, or Ray has died meanwhile.
        """
        deleting = threading.Thread(target=_delete_application, daemon=True)
        deleting.start()
        deadline_s = time.monotonic() + timeout_s
        while deleting.is_alive() and time.monotonic() < deadline_s and self._lost_program(timeout_s=0) is None:
            deleting.join(DRAIN_POLL_S)
        if self._lost_program(timeout_s=0) is not None:
            self._end_dead()
        return not deleting.is_alive()

    def _lost_program(self, timeout_s: float) -> str | None:
        """Which of the programs without which there is no Ray has ended, if one has within `timeout_s`."""
        lost, _ = psutil.wait_procs(list(self._vital), timeout=timeout_s)
        return next((self._vital[process] for process in lost), None)

    def close(self) -> None:
        """End Ray in order, then whatever is left of it, and remove its folder; idempotent."""
        if self._has_ended:
            return
        started = psutil.Process().children(recursive=True)
        if "ray" in sys.modules:
            import ray  # loaded by `start`

            ray.shutdown()
        self._end(started)

    def kill(self) -> None:
        """End all processes at once; nothing is drained."""
        self._end(psutil.Process().children(recursive=True))

    def _end_dead(self) -> None:
        """End what is left of a Ray that cannot be ended in order.

        The guard stays: when this process exits, Ray makes its folder once more.
        """
        self._has_ended = True
        self._end_all(psutil.Process().children(recursive=True))

    def _end_all(self, started: list[psutil.Process]) -> None:
        end_all(self._folder, [process for process in started if process.pid != self._guard.pid])

    def _end(self, started: list[psutil.Process]) -> None:
        self._has_ended = True
        self._end_all(started)
        assert self._guard.stdin is not None, "the guard was started with a pipe"
        self._guard.stdin.close()
        self._guard.wait()

    def __enter__(self) -> "LocalRay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_free_port(host: str, port: int, flag: str = "--port") -> None:
    """Raises `StartupError` where nobody can listen on `host`:`port`; `flag` is what chooses another."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartupError(f"host {host!r} is not an address of this machine: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        # Closed connections of an earlier run do not count, as for the gateway's own socket (`confine_worker`).
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError(f"port {port} on {host} is in use; choose another with {flag}") from error
            raise StartupError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


def with_keyword(function: Callable[..., T], **fixed: object) -> Callable[..., T]:
    """`function` with these arguments, whatever its callers say."""
    return lambda *args, **kwargs: function(*args, **(kwargs | fixed))


def _delete_application() -> None:
    from ray import serve  # loaded by `LocalRay.start`
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        serve.delete(APP_NAME)
    except (RayError, RayServeException, RuntimeError) as error:
        logger.warning("the application could not be deleted: %s", error)


def _reason(messages: Iterable[str]) -> str:
    """The one line in Serve's messages that says why a replica did not start.

    Serve passes on the text of the replica's traceback, whose last line is the error itself.
    """
    lines = [message.strip().splitlines()[-1] for message in messages if message.strip()]
    ours = [line for line in lines if line.startswith("bakehouse_replica.core.errors.")]
    chosen = (ours or lines or ["Serve gave no reason"])[0]
    return chosen.split(": ", 1)[1] if ours else f"a replica did not start: {chosen}"


def _private_folder() -> Path:
    """A new folder that only this user can enter; Ray opens what it makes inside to everybody."""
    for base in (tempfile.gettempdir(), "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="bake-", dir=base))
        if len(os.fsencode(folder)) <= MAX_FOLDER_BYTES:
            return folder
        shutil.rmtree(folder)
    raise StartupError(f"the path of the temporary folder {tempfile.gettempdir()} is too long for Ray's sockets")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(settings: LocalRaySettings, token_path: Path) -> dict[str, str]:
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray turns 127.0.0.1 into the machine's address
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),  # else ~/.ray/auth_token is written and shared by all
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(settings.port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(settings.port + 1),  # exclusive
        "RAY_SERVE_DEFAULT_HTTP_HOST": settings.host,  # for `confine_worker`
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES,
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(settings.max_grpc_bytes),  # else 2 GiB
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(settings.grpc_port or 0),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str((settings.grpc_port or 0) + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # no load balancer has to notice
        "RAY_SERVE_PORT_QUARANTINE_S": "0",  # else the one port is barred for 150 s after a gateway has crashed
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # what cannot start here will not start the third time
    }
