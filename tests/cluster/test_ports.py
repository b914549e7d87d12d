"""Which ports a server may have."""

import socket

import pytest
from bakehouse_cluster.ports import require_free_port
from bakehouse_replica.core.errors import StartupError


def test_a_port_that_somebody_listens_on_is_refused_with_what_to_do() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(StartupError, match=rf"^port {port} on 127\.0\.0\.1 is in use; .*--port"):
            require_free_port("127.0.0.1", port)


def test_a_port_with_closed_connections_only_is_free() -> None:
    """The server closes first here, so that its side stays in TIME_WAIT, as after a Ctrl-C."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
    require_free_port("127.0.0.1", port)


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(StartupError, match=r"^cannot listen on 203\.0\.113\.7, port 8000: "):
        require_free_port("203.0.113.7", 8000)
