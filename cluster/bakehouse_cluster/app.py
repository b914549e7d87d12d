"""Builds the Serve application: gateways in front of replicas, from one configuration."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from math import floor
from typing import Any

import ray
from bakehouse_replica.actor import ReplicaActor
from bakehouse_replica.source import SCRIPT_PREFIX
from bakehouse_router.deployment import GatewayDeployment
from bakehouse_router.ray_client import KvAwareRouter
from bakehouse_router.replicas import REPORT_PERIOD_S
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from bakehouse_cluster.config import Config
from bakehouse_cluster.serve_config import GATEWAY, REPLICA, autoscaling, tracing_environment

# The scheduler queues by itself; Serve must only never be what limits a replica.
MAX_ONGOING_REQUESTS = 4096
# A crashed replica is noticed by this check: 2.0 to 3.3 s to a new one at 1 s, 11.6 s at Serve's default of 10 s.
HEALTH_CHECK_PERIOD_S = 1.0
# A prefill step on a busy laptop may hold the process's lock for a while; three missed seconds would kill it.
HEALTH_CHECK_TIMEOUT_S = 15.0
RAY_SHARES = 10_000  # of a CPU: Ray counts no finer
# Nodes have it on Kubernetes, where the chart names the pools.
POOL_LABEL = "bakehouse/pool"
ROUTING_STATS_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.2
# By default Serve gives its HTTP server, our code and the router of our handle an event loop each, in a thread
# each: every frame changes threads. On one loop, uvloop's, a token of 64 streams costs a gateway 82 us and not 100
# (two cores). In return nothing of ours may block it; what takes long runs in threads and processes of its own.
# Not for all of Ray: a handle whose router has no loop of its own cannot be used where none runs, as in a task
# that calls `bakehouse.connect`.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
# Gateways and replicas talk by Serve's gRPC, which by default refuses messages above 4 MiB: the log-probabilities
# of a long prompt are more. Ray's own calls have no such limit either.
ANY_SIZE = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1)}
# The replicas own the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def build(args: Config) -> Application:
    """The application for `serve.run`, `serve run bakehouse:build` and, declaratively, `serve deploy`.

    Serve passes its `args` mapping through the type of the parameter, so they have the shape of a configuration
    file. Everything random or read from a file is fixed here and handed to all processes alike.
    """
    hash_key = secrets.token_bytes(32)
    replicas = _replica_deployment(args).bind(args.replica_settings(hash_key))
    return _gateway_deployment(args).bind(args.gateway_settings(), replicas)


def _replica_deployment(config: Config) -> serve.Deployment:
    # OpenMP's threads must not spin between products: the gateway and Numba's threads need the same cores. Where
    # both cores were busy, a step of 32 sequences took 502 ms without spinning and 2,796 ms with it; on a quiet
    # machine it makes no difference (168 and 166 ms).
    env_vars = {"OMP_WAIT_POLICY": "passive"} | ONE_LOOP | ANY_SIZE | tracing_environment(config.tracing)
    if config.replica.threads is not None:
        # Otherwise Ray sets OMP_NUM_THREADS to the reserved CPUs, rounded down: one thread on a laptop.
        env_vars["OMP_NUM_THREADS"] = str(max(1, config.replica.threads // config.replica.tensor_parallel))
    nodes = ray.nodes() if ray.is_initialized() else []  # type: ignore[no-untyped-call]
    bundle = rank_bundle(config, has_gpus=have_gpus(nodes, config.replica.pools))
    options: dict[str, object] = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "runtime_env": {"env_vars": env_vars},
    }
    selector = pool_selector(config.replica.pools)
    ranks: dict[str, Any] = {}
    if config.replica.tensor_parallel > 1:
        ranks = {
            "placement_group_bundles": [bundle] * config.replica.tensor_parallel,
            "placement_group_strategy": config.replica.rank_placement.upper(),
            "placement_group_bundle_label_selector": [selector] if selector else None,
        }
    elif selector:
        options["label_selector"] = selector
    autoscale = config.replica.autoscale
    return serve.deployment(
        name=REPLICA,
        num_replicas=config.server.replicas if autoscale is None else None,
        autoscaling_config=None if autoscale is None else autoscaling(autoscale, config.server.gateways),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=config.server.drain_s,
        request_router_config=RequestRouterConfig.model_validate(
            {
                "request_router_class": KvAwareRouter,
                "request_routing_stats_period_s": REPORT_PERIOD_S,
                "request_routing_stats_timeout_s": ROUTING_STATS_TIMEOUT_S,
            }
        ),
        # Every gateway asks each replica for its status twice a second.
        logging_config={"enable_access_log": False},
        ray_actor_options=options,
        **ranks,
    )(ReplicaActor)


def pool_selector(pools: Sequence[str]) -> dict[str, str]:
    """What Ray asks of a node's labels: that it is in one of the pools, or nothing where none is named."""
    match pools:
        case []:
            return {}
        case [pool]:
            return {POOL_LABEL: pool}
        case _:
            return {POOL_LABEL: f"in({','.join(pools)})"}


def have_gpus(nodes: Iterable[Mapping[str, Any]], pools: Sequence[str]) -> bool:
    """Whether a node on which replicas may run, of any pool where none is named, has a GPU; `nodes` as Ray's."""
    return any(
        node["Alive"] and node["Resources"].get("GPU", 0.0) > 0
        for node in nodes
        if not pools or node["Labels"].get(POOL_LABEL) in pools
    )


def rank_bundle(config: Config, *, has_gpus: bool) -> dict[str, float]:
    """What Ray reserves for each rank of a replica, of which the first is the replica's actor itself.

    `has_gpus`: whether there is any where replicas may run. Who reserves none still sees them all, so that of a
    machine with two GPUs each `auto` replica would take the first. Where GPUs join later, replicas refuse to.
    """
    cpus = 1.0 if config.replica.cpus is None else config.replica.cpus
    bundle = {"CPU": floor(cpus / config.replica.tensor_parallel * RAY_SHARES) / RAY_SHARES}
    is_on_gpu = config.model.device == "cuda" or (config.model.device == "auto" and has_gpus)
    runs_model = config.replica.executor == "model" and not config.model.source.startswith(SCRIPT_PREFIX)
    return bundle | {"GPU": 1.0} if is_on_gpu and runs_model else bundle


def _gateway_deployment(config: Config) -> serve.Deployment:
    env_vars = ONE_THREAD | ANY_SIZE | tracing_environment(config.tracing)
    if config.gateway.one_loop:
        env_vars |= ONE_LOOP
    options: dict[str, object] = {"num_cpus": config.gateway.cpus, "runtime_env": {"env_vars": env_vars}}
    if selector := pool_selector(config.gateway.pools):
        options["label_selector"] = selector
    return serve.deployment(
        name=GATEWAY,
        num_replicas=config.server.gateways,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=config.server.drain_s,
        ray_actor_options=options,
    )(GatewayDeployment)
