"""The wheel of this checkout, and virtual environments to install it into."""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """The one wheel that a build of the checkout leaves in `folder`."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder))
    (wheel,) = folder.glob("*.whl")
    return wheel


def new_environment(folder: Path) -> Path:
    """An empty virtual environment; the path of its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def install(python: Path, *arguments: str) -> None:
    """By the pip of this environment into that one."""
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *arguments)


def run(*command: str, cwd: Path = ROOT) -> str:
    """What the command prints. It does not see the checkout as the tests' own process does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout
