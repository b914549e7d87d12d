"""The document that deploys a configuration on a Ray that stands already: Serve's own, for `serve deploy`.

What can be changed while everything runs stands in `deployments`: how many replicas and gateways there are, and in
`user_config` the limits that they take in place. All the rest is the application's `args`, exactly as it is
written in the configuration file: a change of those starts every replica anew. The target decides only who can
reach the server, where its proxies run, and whether the pools of nodes count.

The Helm chart computes the same document from its values, and tests hold the two equal: it is meant to be simple.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Literal

from bakehouse_replica.settings import LIVE_LIMITS as REPLICA_LIMITS
from bakehouse_router.settings import LIVE_LIMITS as GATEWAY_LIMITS

from bakehouse_cluster.config import Config, parse_config
from bakehouse_cluster.config_sections import AutoscaleSection, GatewaySection, ReplicaSection, TracingSection
from bakehouse_cluster.serve_environment import APP_NAME, GRPC_SERVICES

Target = Literal["kubernetes", "laptop"]
BUILDER = "bakehouse:build"
GATEWAY = "Gateway"
REPLICA = "Replica"
# By section: what is not in `args`, because it is in `deployments`.
MOVED = {
    "gateway": GATEWAY_LIMITS,
    "replica": (*REPLICA_LIMITS, "autoscale"),
    "server": ("gateways", "replicas"),
}


def serve_config(tree: Mapping[str, object], target: Target) -> dict[str, object]:
    """The document for the tree of a configuration file.

    On `kubernetes` every node has a proxy that listens on all addresses; on a `laptop` there is one, where
    `server.host` says, and pools do not count. Raises `ConfigError` as `parse_config` does.
    """
    config = parse_config(tree)
    server = config.server
    is_cluster = target == "kubernetes"
    document: dict[str, object] = {
        "proxy_location": "EveryNode" if is_cluster else "HeadOnly",
        "http_options": {"host": "0.0.0.0" if is_cluster else server.host, "port": server.port},
    }
    if server.grpc_port is not None:
        document["grpc_options"] = {"port": server.grpc_port, "grpc_servicer_functions": [GRPC_SERVICES]}
    # Also where nothing is traced: without it Serve's controller would keep what an earlier document has said.
    document["tracing_config"] = tracing(config.tracing)
    application = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": _args(tree, keeps_pools=is_cluster),
        "deployments": _deployments(config),
    }
    return document | {"applications": [application]}


def autoscaling(autoscale: AutoscaleSection, n_gateways: int) -> dict[str, object]:
    """Serve's `autoscaling_config`.

    Serve counts calls that are under way, and with each replica's requests the one call by which each gateway is
    subscribed to it for as long as both live.
    """
    return {
        "min_replicas": autoscale.min_replicas,
        "max_replicas": autoscale.max_replicas,
        "target_ongoing_requests": autoscale.target_requests + n_gateways,
        "upscale_delay_s": autoscale.upscale_delay_s,
        "downscale_delay_s": autoscale.downscale_delay_s,
    }


def tracing(section: TracingSection) -> dict[str, object]:
    """Serve's `tracing_config`, for its replicas."""
    if not section.enabled:
        return {"enabled": False}
    return {
        "enabled": True,
        "exporter_import_path": _exporter(section),
        "sampling_ratio": section.sampling_ratio,
    }


def tracing_environment(section: TracingSection) -> dict[str, str]:
    """What processes with spans read from their environment.

    Serve hands the exporters no arguments, which therefore come by OpenTelemetry's names. And it does not hand its
    proxies in Python, which pass on a client's `traceparent` only where they trace, the `tracing_config`; they
    read Serve's own variables, when they start.
    """
    if not section.enabled:
        return {}
    endpoint = {} if section.endpoint is None else {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": section.endpoint}
    return {
        "OTEL_SERVICE_NAME": APP_NAME,
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": _exporter(section),
        "RAY_SERVE_TRACING_SAMPLING_RATIO": str(section.sampling_ratio).removesuffix(".0"),  # as Helm writes it
    } | endpoint


def _exporter(section: TracingSection) -> str:
    return f"bakehouse_cluster.span_export:to_{section.exporter}"


def _deployments(config: Config) -> list[dict[str, object]]:
    autoscale = config.replica.autoscale
    gateway: dict[str, object] = {"name": GATEWAY, "num_replicas": config.server.gateways}
    replica: dict[str, object] = {"name": REPLICA}
    if autoscale is None:
        replica["num_replicas"] = config.server.replicas
    else:
        replica["autoscaling_config"] = autoscaling(autoscale, config.server.gateways)
    # Also where it is empty: limits that are no longer named are then those of before again.
    gateway["user_config"] = _live_limits(config.gateway, GATEWAY_LIMITS)
    replica["user_config"] = _live_limits(config.replica, REPLICA_LIMITS)
    return [gateway, replica]


def _live_limits(section: GatewaySection | ReplicaSection, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(section, name) for name in names if name in section.model_fields_set}


def _args(tree: Mapping[str, object], *, keeps_pools: bool) -> dict[str, object]:
    args: dict[str, object] = {}
    for name, section in tree.items():
        assert isinstance(section, Mapping), "the tree has been checked"
        moved = (*MOVED.get(name, ()), *(() if keeps_pools else ("pools",)))
        kept = {key: deepcopy(value) for key, value in section.items() if key not in moved}
        if kept:
            args[name] = kept
    return args
