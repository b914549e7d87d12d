"""Virtual environments of the peers, each made once and kept."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

Report = Callable[[str], None]


class Unavailable(Exception):
    """A system cannot be measured here; the message says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What is installed. `pip_steps`: arguments of pip, in order. `variables`: for the builds among them."""

    name: str
    pip_steps: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Differs where something else would be installed."""
        steps = repr((self.pip_steps, sorted(self.variables.items())))
        return blake2b(steps.encode(), digest_size=8).hexdigest()


def made_environment(environment: Environment, folder: Path, report: Report) -> Path:
    """The `bin` of `environment` under `folder`, installed now if it is not there yet.

    Raises `Unavailable` with the last line of pip's output; all of it is in `<name>.log` beside the environment.
    """
    path = folder / environment.name
    done = path / "installed"
    if done.is_file() and done.read_text() == environment.digest:
        return path / "bin"
    shutil.rmtree(path, ignore_errors=True)
    report(f"{environment.name}: installing into {path}, once")
    venv.create(path, with_pip=True)
    log_path = folder / f"{environment.name}.log"
    with log_path.open("wb") as log:
        for step in environment.pip_steps:
            report(f"{environment.name}: pip {' '.join(step)}")
            argv = (str(path / "bin" / "python"), "-m", "pip", *step)
            ended = subprocess.run(argv, stdout=log, stderr=log, env=os.environ | environment.variables)
            if ended.returncode != 0:
                raise Unavailable(f"pip {' '.join(step)}: {last_line(log_path)}")
    done.write_text(environment.digest)
    return path / "bin"


def own_bin() -> Path:
    """The `bin` of the environment that this runs in."""
    return Path(sys.executable).parent


def last_line(log_path: Path) -> str:
    """The last line of a log that names an error, or else its last line that is not empty."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:300]
