"""The parts of the local Ray that need no Ray; `tests/e2e/test_serve.py` runs the rest."""

import socket
import stat
import tempfile
from pathlib import Path

import pytest
from bakehouse_cluster import local_ray
from bakehouse_cluster.local_ray import MAX_FOLDER_BYTES, require_free_port
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


def test_the_folder_is_private_and_short_enough_for_rays_sockets() -> None:
    folder = local_ray._private_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder)) <= MAX_FOLDER_BYTES
    finally:
        folder.rmdir()


def test_a_temporary_folder_with_a_long_path_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = local_ray._private_folder()
    try:
        assert folder.parent == Path("/tmp")
        assert not any(deep.iterdir())
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "The deployment failed to start 1 times in a row.\nTraceback:\n  File\n"
            "bakehouse_replica.core.errors.StartupError: kv_memory is 3 B: too small",
            "kv_memory is 3 B: too small",
        ),
        ("Traceback:\n  File\nMemoryError: no more", "a replica did not start: MemoryError: no more"),
        ("", "a replica did not start: Serve gave no reason"),
    ],
)
def test_the_reason_of_a_failed_start_is_one_line(message: str, reason: str) -> None:
    assert local_ray._reason(["", message]) == reason
