"""Ports of this machine: which are free, and what is said where one is not."""

import errno
import socket

from bakehouse_replica.core.errors import StartupError

LOOPBACK = "127.0.0.1"


def require_free_port(host: str, port: int, flag: str = "--port") -> None:
    """Raises `StartupError` where nobody can listen on `host`:`port`; `flag` is what chooses another."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StartupError(f"host {host!r} is not an address of this machine: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        # Closed connections of an earlier run do not count, as for the server's own socket (`confine_worker`).
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError(f"port {port} on {host} is in use; choose another with {flag}") from error
            raise StartupError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


def require_free_ports(host: str, port: int, grpc_port: int | None) -> None:
    """Raises `StartupError` where nobody can listen on one of a server's ports."""
    require_free_port(host, port)
    if grpc_port is not None:
        require_free_port(host, grpc_port, flag="--grpc-port")


def free_port() -> int:
    """A port on loopback that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
