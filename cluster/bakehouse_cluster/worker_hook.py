"""Mends Ray Serve in each worker process of the local Ray, for which `local_ray` names it by its path."""

import socket
from typing import Protocol

from bakehouse_cluster.local_ray import with_keyword
from bakehouse_cluster.ports import LOOPBACK


class GrpcServer(Protocol):
    """What is used of Serve's gRPC server."""

    def add_insecure_port(self, address: str) -> int: ...


def confine_worker() -> None:
    """Runs before the worker's actor is made; mends habits of Ray Serve 2.60.

    Each Serve replica opens a gRPC port for calls between deployments on all interfaces; here it is loopback. The
    port for clients' gRPC is opened on all, too; here where HTTP's is. The gateway binds its HTTP port without
    SO_REUSEADDR, so that a server that had open connections could not be started again for 60 s; the proxy has
    SO_REUSEPORT besides, so that two servers that were started together would share a port without a word. Here
    both have the first and not the second. None of these can be configured.
    """
    # Workers here only ever run Serve's actors.
    from ray.serve._private import constants, default_impl, http_util, replica

    names = vars(replica)
    add_port, listen = names["add_port_to_grpc_server"], names["start_asgi_http_server"]
    names["add_port_to_grpc_server"] = lambda server, _address: add_port(server, f"{LOOPBACK}:0")
    names["start_asgi_http_server"] = with_keyword(listen, enable_so_reuseport=True)
    vars(http_util)["set_socket_reuse_port"] = _reuse_address
    host = constants.DEFAULT_HTTP_HOST or LOOPBACK  # as `LocalRay.start` sets it in the environment

    def add_grpc_address(server: GrpcServer, address: str) -> None:
        server.add_insecure_port(f"{_bracketed(host)}:{address.rpartition(':')[2]}")

    vars(default_impl)["add_grpc_address"] = add_grpc_address


def _reuse_address(listener: socket.socket) -> bool:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
