"""What Ray and its Serve are told by environment variables, above all how requests come in.

Serve reads them when it is imported, in every process, so they are set before and passed on to all workers. For a
Ray of our own on one machine `environment` has them, for a cluster that others start `cluster_environment`.

| ingress   | who listens on the asked ports                               | gateways | beyond loopback |
|-----------|--------------------------------------------------------------|----------|-----------------|
| `direct`  | the gateway itself                                           | one      | as `host` says  |
| `proxy`   | Serve's proxy in Python, which passes on each frame with Ray | any      | as `host` says  |
| `haproxy` | HAProxy, which passes on the gateways' bytes                 | any      | always          |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bakehouse_cluster.ports import free_port

Ingress = Literal["direct", "proxy", "haproxy"]

APP_NAME = "bakehouse"
GRPC_SERVICES = "bakehouse_router.grpc_ingress.add_services"
# Holds what a reply can report of the longest prompts.
MIN_GRPC_BYTES = 64 * 1024 * 1024
MIDDLEWARES = "bakehouse_router.serve_headers.middlewares"
# HAProxy keeps a list of the gateways for so long after one has gone; a stream that lasts longer is cut off.
HARD_STOP_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRaySettings:
    """Where the server listens and what Ray may use; `n_cpus` is what Ray's scheduler may hand out.

    `grpc_port` None offers no gRPC. `max_grpc_bytes` bounds one message of it, either way. `tracing`: Serve's
    `tracing_config`, None where nothing is traced; `variables`: for all processes besides those that are needed.
    """

    host: str
    port: int
    grpc_port: int | None = None
    ingress: Ingress = "direct"
    max_grpc_bytes: int = MIN_GRPC_BYTES
    n_cpus: int
    object_store_bytes: int
    tracing: Mapping[str, object] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


# On one machine no load balancer has to notice that a gateway goes.
_NO_BALANCER = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}

# What Ray and Serve do all the time on one machine where little changes. At their own pace (0.1 s, 0.1 s, 5 s,
# 0.1 s, 1 s) an idle server takes 14 % of a core, a quarter of it Serve's controller; so it takes 9.5 %.
UNHURRIED = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # no longer than the period of the replicas' reports
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",  # they are read every 10 s
    "REPORTER_UPDATE_INTERVAL_MS": "15000",  # the dashboard's view of processes
    "RAY_raylet_report_resources_period_milliseconds": "500",
    "RAY_task_events_report_interval_ms": "5000",
}


def cluster_environment(*, drain_s: float = 30.0, haproxy: bool = True) -> dict[str, str]:
    """The variables for the head and every worker of a cluster, whose nodes have an address of their own each.

    `drain_s`: `server.drain_s` of the configuration. `haproxy` False leaves Serve's own proxies in front.
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES,  # Serve's headers are not for clients to set
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(MIN_GRPC_BYTES),  # else 2 GiB
        "RAY_worker_register_timeout_seconds": "300",  # else 60: a cold image takes longer to import torch
        "RAY_worker_niceness": "0",  # else 15: gateways and replicas would yield to whatever else runs on the node
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",  # else 5, after which a proxy that starts is started again
        # A node that is told to go lets its streams end; 30 by default, whatever `server.drain_s` is.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{drain_s:g}",
        **(_haproxy() if haproxy else {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}),
    }


def environment(settings: LocalRaySettings, folder: Path, token_path: Path) -> dict[str, str]:
    """The variables for a Ray in `folder`, whose token lies in a file."""
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray turns 127.0.0.1 into the machine's address
        "RAY_USAGE_STATS_ENABLED": "0",
        "DASHBOARD_METRIC_PORT": str(free_port()),  # else 44227, which the first Ray of a machine has
        "AUTOSCALER_METRIC_PORT": str(free_port()),  # else 44217
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),  # else ~/.ray/auth_token is written and shared by all
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES,
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(settings.max_grpc_bytes),  # else 2 GiB
        "RAY_worker_register_timeout_seconds": "300",  # else 60: a busy machine takes longer to start a process
        "RAY_worker_niceness": "0",  # else 15: beside one other busy program a start took five minutes
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",  # else 5, after which a proxy that starts is started again
        **UNHURRIED,
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # what cannot start here will not start the third time
        **_ingress_environment(settings, folder),
        **settings.variables,
    }


def _ingress_environment(settings: LocalRaySettings, folder: Path) -> dict[str, str]:
    match settings.ingress:
        case "direct":
            return _direct(settings)
        case "proxy":
            return {
                "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
                "RAY_SERVE_DEFAULT_HTTP_HOST": settings.host,  # for `confine_worker`
            }
        case "haproxy":
            return _haproxy() | haproxy_places(folder / "haproxy") | _NO_BALANCER


def _direct(settings: LocalRaySettings) -> dict[str, str]:
    grpc_port = settings.grpc_port or 0
    return {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DEFAULT_HTTP_HOST": settings.host,  # for `confine_worker`
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(settings.port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(settings.port + 1),  # exclusive
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc_port + 1),
        **_NO_BALANCER,
        "RAY_SERVE_PORT_QUARANTINE_S": "0",  # else the one port is barred for 150 s after a gateway has crashed
    }


def haproxy_places(folder: Path) -> dict[str, str]:
    """Files in a private folder, and free ports for its own two, so that several may live on one machine."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "s"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }


def _haproxy() -> dict[str, str]:
    """No process in Python passes on the gateways' bytes, and gRPC calls that clients give up are cancelled; where
    Serve's own proxy stands in front, some go on.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(HARD_STOP_S),
    }
