"""Renders the Helm chart with the real helm, and finds things in what comes out."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from bakehouse_replica.source import default_cache_root
from filelock import FileLock

ROOT = Path(__file__).parents[2]
GET_HELM = ROOT / "tests" / "helm" / "tools" / "get_helm.py"
CHART = ROOT / "helm"
EXAMPLES = tuple(sorted(path.name.removesuffix("-values.yaml") for path in CHART.glob("ci/*-values.yaml")))
NAMESPACE = "llm"
JSON = re.compile(r'\[|\{"|\{\}|-?[0-9]+\.[0-9]+$')
# Plain YAML: whatever a chart says.
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Helm:
    """One helm; what it has rendered, it renders no second time."""

    folder: Path
    chart: Path = CHART
    rendered: dict[tuple[str, ...], subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`helm ARGUMENTS`, whatever its exit status."""
        if arguments not in self.rendered:
            command = [str(self.folder / "helm"), *arguments]
            self.rendered[arguments] = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return self.rendered[arguments]

    def template(self, example: str, *sets: str, name: str = "demo", options: tuple[str, ...] = ()) -> str:
        """The manifest of an example with `sets` (`path=value`, comma-separated) on top of it."""
        done = self._template(example, sets, name, options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, example: str, *sets: str, name: str = "demo") -> list[Tree]:
        """The same, parsed."""
        return parse(self.template(example, *sets, name=name))

    def refusal(self, example: str, *sets: str, name: str = "demo") -> str:
        """Why helm does not render it."""
        done = self._template(example, sets, name, ())
        assert done.returncode != 0, f"accepted: {sets}"
        return done.stderr

    def _template(
        self, example: str, sets: tuple[str, ...], name: str, options: tuple[str, ...]
    ) -> subprocess.CompletedProcess[str]:
        changes = [part for change in sets for part in (_flag(change), change)]
        chart = str(self.chart)
        return self.run("template", name, chart, "-n", NAMESPACE, "-f", values_path(example), *changes, *options)


def real_helm(version: str) -> Helm:
    """From the user's cache folder; the first time it is downloaded, 38 MB, by checksum."""
    folder = default_cache_root() / f"helm-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # tests run in several processes
        subprocess.run([sys.executable, str(GET_HELM), "--helm", version, str(folder)], check=True, timeout=240)
    return Helm(folder)


def _flag(change: str) -> str:
    """Mappings, lists of them and fractions are written as JSON; lists of words as `{a,b}`."""
    return "--set-json" if JSON.match(change.partition("=")[2]) else "--set"


def values_path(example: str) -> str:
    """The example's file."""
    return str(CHART / "ci" / f"{example}-values.yaml")


def values(example: str) -> Tree:
    """What is in it."""
    return yaml.safe_load(Path(values_path(example)).read_text()) or {}


def parse(manifest: str) -> list[Tree]:
    """The objects of a manifest."""
    return [document for document in yaml.safe_load_all(manifest) if document]


def of_kind(objects: list[Tree], kind: str) -> list[Tree]:
    """The objects of one kind."""
    return [one for one in objects if one["kind"] == kind]


def ray_service(objects: list[Tree]) -> Tree:
    """The RayService's spec."""
    (service,) = of_kind(objects, "RayService")
    spec: Tree = service["spec"]
    return spec


def cluster(objects: list[Tree]) -> Tree:
    """Its rayClusterConfig."""
    config: Tree = ray_service(objects)["rayClusterConfig"]
    return config


def pods(objects: list[Tree]) -> dict[str, Tree]:
    """The pod specs by name of their group, `head` first."""
    config = cluster(objects)
    groups = {"head": config["headGroupSpec"]} | {
        group["groupName"]: group for group in config["workerGroupSpecs"]
    }
    return {name: group["template"]["spec"] for name, group in groups.items()}


def containers(objects: list[Tree]) -> dict[str, Tree]:
    """The Ray containers by name of their group."""
    return {name: pod["containers"][0] for name, pod in pods(objects).items()}


def environment(container: Tree) -> dict[str, str]:
    """Its variables; what comes from a Secret is not among them."""
    return {item["name"]: item["value"] for item in container.get("env", []) if "value" in item}


def serve_text(objects: list[Tree]) -> str:
    """serveConfigV2, as KubeRay's operator sends it to Ray."""
    text: str = ray_service(objects)["serveConfigV2"]
    return text


def serve_document(objects: list[Tree]) -> Tree:
    """serveConfigV2, parsed."""
    document: Tree = yaml.safe_load(serve_text(objects))
    return document
