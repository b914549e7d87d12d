"""What `bakehouse serve` refuses before it starts anything, in one line each."""

from ipaddress import ip_address

import psutil
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.source import ModelFiles, require_tokenizer
from bakehouse_router.keys import read_keys

from bakehouse_cluster.config import Config
from bakehouse_cluster.ports import require_free_ports
from bakehouse_cluster.span_export import require_exporter

# What models and machines may not be able to do.
_OF_MODEL = {"max_model_len", "dtype", "quantize", "kv_dtype", "device"}
_OF_REPLICA = {"kv_memory", "block_size", "tensor_parallel"}


def check_before_start(config: Config) -> None:
    """Raises `StartupError` where a local server could not serve as asked, or must not."""
    _require_one_gateway(config)
    _require_keys_beyond_loopback(config)
    _require_memory(config)
    _require_free_ports(config)
    config.gateway_settings()  # reads the chat template
    if config.tracing.enabled and config.tracing.exporter == "otlp":
        require_exporter()
    if config.gateway.keys is not None:
        read_keys(config.gateway.keys)


def check_model(config: Config, files: ModelFiles) -> None:
    """Raises `StartupError` where no replica could serve the model as asked.

    What is served reads and writes text, which takes a tokenizer. Without options that could be at odds with model
    or machine there is nothing else to find, and a start need not wait two seconds for torch and transformers.
    """
    require_tokenizer(files)
    if not (config.model.model_fields_set & _OF_MODEL or config.replica.model_fields_set & _OF_REPLICA):
        return
    from bakehouse_replica.executors.checking import check_settings

    check_settings(config.replica_settings(hash_key=b""), files)


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
    wanted_bytes = (config.replica.kv_memory or 0) * config.max_replicas + config.server.object_store
    if wanted_bytes > total_bytes:
        raise StartupError(
            f"kv_memory and object store want {wanted_bytes / 2**30:,.1f} GiB; this machine's memory is "
            f"{total_bytes / 2**30:,.1f} GiB"
        )
