"""The image, built by the commands of docs/image.md as they stand there, and what runs in it."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import running

ROOT = Path(__file__).parents[2]
SECTION = "## Without a network, and without a registry"
IMAGE = "localhost/bakehouse:0.1.0"
LACKING = [tool for tool in ("buildah", "mmdebstrap", "python3.11") if not shutil.which(tool)]
# A container's first start compiles the kernels; a busy machine takes its time.
START_TIMEOUT_S = 1800.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(
        bool(LACKING), reason=f"needs {' and '.join(LACKING)}, of the Debian packages of that name"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: buildah's isolation is chroot"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the recipe has run: a copy of what .dockerignore lets in; its gigabytes go when the tests have."""
    made = tmp_path_factory.mktemp("recipe")
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for name in ["Dockerfile", *(line[1:] for line in lines if line.startswith("!") and line != "!wheels")]:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, made / name)
    (made / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{made}/storage"\nrunroot = "{made}/storage-run"\n'
    )
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def recipe(folder: Path) -> str:
    """What the documented commands printed."""
    section = (ROOT / "docs" / "image.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    assert commands.count("buildah build") == 1
    return sh(commands, folder)


def sh(commands: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def environment(folder: Path) -> dict[str, str]:
    """With an image store of its own."""
    return os.environ | {"CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "STORAGE_DRIVER": "vfs"}


def test_the_documented_commands_build_an_image_that_runs_without_root(recipe: str) -> None:
    assert "uid=1000(bakehouse) gid=0(root)" in recipe
    assert "Serve a model over HTTP" in recipe


def test_ray_in_the_image_is_the_one_that_the_tests_ran_with(recipe: str) -> None:
    ray = subprocess.run(["ray", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    assert ray in recipe


def test_the_image_serves_its_own_model(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    container = sh(f"buildah from {IMAGE}", folder).strip()
    program = ["buildah", "run", "--isolation", "chroot", container, "--", "bakehouse"]
    with running(folder / "log", program=program, start_timeout_s=START_TIMEOUT_S) as server:
        answer = server.sdk.completions.create(model="smollm2", prompt="The capital of France is", temperature=0)
        assert "Paris" in answer.choices[0].text
