"""A private Ray on this machine that is a good guest: loopback, own ports and folder, bounded, gone without trace.

Ray and Serve read their environment when they are imported, so this module sets it first and imports them inside
its functions; nothing that imports Serve may be imported before `LocalRay.start` has returned.
"""

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import psutil
from bakehouse_replica.core.errors import StartupError, Unavailable

from bakehouse_cluster.guard import end_all
from bakehouse_cluster.ports import LOOPBACK, free_port, require_free_ports
from bakehouse_cluster.progress import n_of
from bakehouse_cluster.serve_environment import APP_NAME, GRPC_SERVICES, LocalRaySettings, environment

if TYPE_CHECKING:
    from ray.serve import Application

logger = logging.getLogger(__name__)

# A Unix socket's path holds 107 bytes on Linux and 103 on macOS; Ray appends "/ray/session_<date>_<time>_<pid>/
# sockets/plasma_store" to our folder, 70 bytes with a pid of seven digits.
MAX_FOLDER_BYTES = 103 - 70
# Without one of them there is no Ray; whatever else dies is started again, by Serve or by Ray.
VITAL_PROGRAMS = frozenset({"raylet", "gcs_server"})
LOST_POLL_S = 1.0
# What Serve says where a gateway cannot have its port: at the first attempt, and at those after it.
TAKEN_PORT_SIGNS = ("Failed to bind to address", "NoAvailablePortError")
DRAIN_POLL_S = 0.1
# Serve's proxy takes 3 s to start where nothing else runs; Serve would give up after 60 s.
START_TIMEOUT_S = 300.0
WORKER_HOOK = "bakehouse_cluster.worker_hook.confine_worker"
T = TypeVar("T")


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
    def folder(self) -> Path:
        """Ray's temporary folder, which `bakehouse monitor` asks for; removed by `close`."""
        return self._folder / "ray"

    @property
    def log_folder(self) -> Path:
        """Where Ray and Serve write; removed by `close`."""
        return self.folder / "session_latest" / "logs"

    @property
    def token_path(self) -> Path:
        """The file with the token that the dashboard asks for; only this user can enter its folder."""
        return self._folder / "token"

    def start(self, *, take_signals: Callable[[], None]) -> None:
        """Start Ray and Serve; raises `StartupError` where the machine refuses.

        `take_signals` installs the caller's handlers, once more where Ray has taken SIGTERM for itself.
        """
        self.token_path.write_text(secrets.token_hex(32))
        os.environ.update(environment(self._settings, self._folder, self.token_path))
        import ray  # reads the environment set above
        from ray._private import services, utils, worker
        from ray._private.parameter import RayParams

        logging.getLogger("ray").setLevel(logging.ERROR)
        # Of a program that dies it would print the last 20 lines of the log; `wait_until_lost` says it in one.
        vars(worker)["print_to_stdstream"] = lambda *_lines, **_options: None
        vars(utils)["set_sigterm_handler"] = lambda _handler: None
        # Ray shields its processes from a Ctrl-C, but a SIGTERM to our whole group, as `timeout` sends it, would
        # end them before they are drained.
        vars(services)["ConsolePopen"] = with_keyword(services.ConsolePopen, start_new_session=True)
        vars(worker)["connect"] = _with_sigterm_held(worker.connect, take_signals)
        # `ray.init` has no arguments for these. The port's default is 52365 for every Ray of a machine. The log
        # monitor reads all logs all the time to print them here, which is not wanted; the dashboard reads the
        # files itself.
        RayParams.__init__ = with_keyword(  # type: ignore[method-assign]
            RayParams.__init__, dashboard_agent_listen_port=0, include_log_monitor=False
        )
        begun_s = time.monotonic()
        try:
            context = ray.init(
                address="local",
                num_cpus=self._settings.n_cpus,
                object_store_memory=self._settings.object_store_bytes,
                include_dashboard=True,
                dashboard_host=LOOPBACK,
                dashboard_port=free_port(),
                logging_level=logging.ERROR,
                log_to_driver=False,
                namespace="serve",
                runtime_env={"worker_process_setup_hook": WORKER_HOOK},
                _node_ip_address=LOOPBACK,
                _temp_dir=str(self.folder),
            )
        except Exception as error:
            if not is_of_ray(error):
                raise
            raise StartupError(self._failure("Ray", str(error), time.monotonic() - begun_s)) from error
        children = [(child, child.name()) for child in psutil.Process().children()]
        self._vital = {child: name for child, name in children if name in VITAL_PROGRAMS}
        self.dashboard_address = f"http://{context.dashboard_url}"
        self.address = ray.get_runtime_context().gcs_address
        self._start_serve()

    def _start_serve(self) -> None:
        from ray import serve  # reads the environment set by `start`
        from ray.exceptions import RayError
        from ray.serve._private import api as serve_api
        from ray.serve.config import HTTPOptions, gRPCOptions

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        settings = self._settings
        # With direct ingress the gateway listens on the asked ports. Serve starts its proxy all the same, which
        # gets free ones.
        is_direct = settings.ingress == "direct"
        services = [] if settings.grpc_port is None else [GRPC_SERVICES]
        grpc_port = free_port() if is_direct else settings.grpc_port or free_port()
        vars(serve_api)["HTTP_PROXY_TIMEOUT"] = START_TIMEOUT_S
        begun_s = time.monotonic()
        try:
            serve.start(
                http_options=HTTPOptions(host=settings.host, port=0 if is_direct else settings.port),
                grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=services),
                proxy_location="HeadOnly",
                tracing_config=None if settings.tracing is None else dict(settings.tracing),
            )
        except (RayError, TimeoutError) as error:
            self._refuse_taken_port([str(error)])
            raise StartupError(self._failure("Serve", str(error), time.monotonic() - begun_s)) from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # `serve.start` has set it back to INFO

    def _failure(self, what: str, reason: str, waited_s: float) -> str:
        """What failed, after how long, why as far as Ray says, and where its logs are, which are kept."""
        kept = Path(tempfile.mkdtemp(prefix="bakehouse-logs-"))
        try:
            shutil.copytree(self.log_folder, kept, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            logger.warning("not all logs could be kept: %s", error)
        # Ray's messages begin with what every one of them says, and with fields by tabs.
        said = " ".join(line for line in reason.splitlines()[-2:] if not line.startswith("\t"))
        return (
            f"{what} did not start, after {waited_s:.0f} s: {said} {_busyness(self._settings.n_cpus)}"
            f"Its logs are kept in {kept}"
        )

    def deploy(self, application: "Application") -> None:
        """Run the application and wait until all its replicas do.

        Raises `StartupError` with the reason that a replica gave.
        """
        from ray import serve  # reads the environment set by `start`

        try:
            serve.run(application, name=APP_NAME)
        except RuntimeError as error:
            messages = [status.message for status in serve.status().applications[APP_NAME].deployments.values()]
            self._refuse_taken_port(messages)
            raise StartupError(_reason(messages)) from error

    def _refuse_taken_port(self, messages: Iterable[str]) -> None:
        """Raises `StartupError` where Serve's messages tell of a port that another server has.

        It was free when this one looked first: the two were started at the same time.
        """
        if any(sign in message for message in messages for sign in TAKEN_PORT_SIGNS):
            require_free_ports(self._settings.host, self._settings.port, self._settings.grpc_port)

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


def is_of_ray(error: Exception) -> bool:
    """Whether `ray.init` raises such an error where the machine does not let it start.

    Where its own processes are too slow, it raises an `Exception` of no class of its own.
    """
    from ray.exceptions import RayError  # loaded by `LocalRay.start`

    return type(error) is Exception or isinstance(error, OSError | RuntimeError | ValueError | RayError)


def with_keyword(function: Callable[..., T], **fixed: object) -> Callable[..., T]:
    """`function` with these arguments, whatever its callers say."""
    return lambda *args, **kwargs: function(*args, **(kwargs | fixed))


def _with_sigterm_held(connect: Callable[..., T], take_signals: Callable[[], None]) -> Callable[..., T]:
    """`connect`, in which SIGTERM waits: the C++ library takes it there, and would print its stack for it."""

    def connect_undisturbed(*args: object, **kwargs: object) -> T:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return connect(*args, **kwargs)
        finally:
            take_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    return connect_undisturbed


def _busyness(n_cpus: int) -> str:
    """A sentence where the machine has more to do than it can."""
    load, _, _ = os.getloadavg()
    if load <= n_cpus:
        return ""
    return f"This machine is busy (load {load:.1f} on {n_of(n_cpus, 'CPU')}): start it again when it is less so. "


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
