"""What `bakehouse serve` refuses before it starts anything, in one line each."""

from ipaddress import ip_address

import psutil
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.source import ModelFiles
from bakehouse_router.keys import read_keys

from bakehouse_cluster.config import Config
from bakehouse_cluster.ports import require_free_ports


def check_before_start(config: Config) -> None:
    """Raises `StartupError` where a local server could not serve as asked, or must not."""
    _require_one_gateway(config)
    _require_keys_beyond_loopback(config)
    _require_memory(config)
    _require_free_ports(config)
    config.gateway_settings()  # reads the chat template
    if config.gateway.keys is not None:
        read_keys(config.gateway.keys)


def check_ranks(config: Config, files: ModelFiles) -> None:
    """Raises `StartupError` where the model cannot be shared by as many ranks as are asked for."""
    if config.replica.tensor_parallel > 1 and not files.is_script:
        # Loads torch and transformers, which a server of whole models need not wait for.
        from bakehouse_replica.model.sharding import check_sizes
        from bakehouse_replica.model.spec import read_spec

        check_sizes(read_spec(files), config.replica.tensor_parallel)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _require_one_gateway(config: Config) -> None:
    if config.server.gateways > 1 and config.server.ingress == "direct":
        raise StartupError(
            f"server.gateways: a local server has one gateway, which listens on the port itself, not "
            f"{config.server.gateways}; --ingress proxy or haproxy puts a proxy in front of several"
        )


def _require_keys_beyond_loopback(config: Config) -> None:
    server = config.server
    if config.gateway.keys is not None or server.allow_unauthenticated:
        return
    if server.ingress == "haproxy":
        raise StartupError(
            "server.ingress: HAProxy listens on all of this machine's addresses and nobody would be asked for a "
            "key; give --keys FILE, or --allow-unauthenticated if that is meant"
        )
    if is_loopback(server.host):
        return
    raise StartupError(
        f"server.host: {server.host} can be reached from outside and nobody would be asked for a key; give --keys "
        f"FILE, or --allow-unauthenticated if that is meant"
    )


def _require_free_ports(config: Config) -> None:
    server = config.server
    if server.grpc_port == server.port:
        raise StartupError(f"server.grpc_port: {server.grpc_port} is the port of HTTP, too; choose another")
    require_free_ports(server.host, server.port, server.grpc_port)


def _require_memory(config: Config) -> None:
    """Refuses at once what no replica could get; the exact check is the replica's, which knows the model."""
    total_bytes = psutil.virtual_memory().total
    wanted_bytes = (config.replica.kv_memory or 0) * config.server.replicas + config.server.object_store
    if wanted_bytes > total_bytes:
        raise StartupError(
            f"kv_memory and object store want {wanted_bytes / 2**30:,.1f} GiB; this machine's memory is "
            f"{total_bytes / 2**30:,.1f} GiB"
        )
