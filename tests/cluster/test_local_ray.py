"""The parts of the local Ray that need no Ray; `tests/e2e/test_serve.py` runs the rest."""

import stat
import tempfile
from pathlib import Path

import pytest
from bakehouse_cluster import local_ray
from bakehouse_cluster.local_ray import MAX_FOLDER_BYTES


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
    ("error", "expected"),
    [
        (Exception("The current node timed out during startup."), True),
        (RuntimeError("no"), True),
        (ConnectionError("no"), True),
        (KeyError("ours"), False),
        (AssertionError("ours"), False),
    ],
)
def test_what_ray_raises_where_it_cannot_start_is_told_from_our_own_mistakes(
    error: Exception, expected: bool
) -> None:
    assert local_ray.is_of_ray(error) is expected


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
