"""The real helm installs, upgrades, rolls back and uninstalls the chart, against a stand-in for the API server."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from charts import CHART, NAMESPACE, Helm, values_path
from fakekube import FakeKube
from refused_values import CONTRADICTIONS, WRONG_VALUES

HERE = Path(__file__).parent
# A handful, as each is an upgrade of its own; the templates' other refusals are the same, without a server.
REFUSED = [",".join(refused.sets) for refused in [*CONTRADICTIONS, *WRONG_VALUES[:6]] if refused.example == "full"]


@pytest.fixture
def kube(crds: Path) -> Iterator[FakeKube]:
    with FakeKube(crds) as kube:
        yield kube


def _run(helm: Helm, kube: FakeKube, *command: str) -> str:
    binary, *arguments = command
    done = subprocess.run(
        [str(helm.folder / binary), *arguments, "--namespace", NAMESPACE],
        env=kube.env(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("crds")
def test_install_upgrade_refusals_rollback_and_uninstall(helm: Helm) -> None:
    refusals = [part for sets in REFUSED for part in ("--refuse", sets)]
    command = [
        sys.executable, str(HERE / "tools" / "chart_lifecycle.py"), str(CHART), "-f", values_path("full"),
        "--bin", str(helm.folder), *refusals,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok     an upgrade of the chart's version leaves the RayService alone" in done.stdout
    assert done.stdout.count("is refused") == len(REFUSED)
    assert "PersistentVolumeClaim/chat-cache" in done.stdout.splitlines()[-1]  # kept


def test_a_new_version_of_chart_and_app_leaves_the_ray_service_alone_where_the_tag_is_pinned(
    helm: Helm, kube: FakeKube, tmp_path: Path
) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    _run(helm, kube, "helm", "install", "demo", str(chart), "-f", values_path("one-gpu"))
    before = kube.get("RayService", NAMESPACE, "demo-bakehouse")
    meta = chart / "Chart.yaml"
    meta.write_text(re.sub(r"(?m)^(version|appVersion):.*$", r"\1: 9.9.9", meta.read_text()))
    _run(helm, kube, "helm", "upgrade", "demo", str(chart), "-f", values_path("one-gpu"))
    after = kube.get("RayService", NAMESPACE, "demo-bakehouse")
    assert before is not None
    assert after is not None
    assert after["metadata"]["labels"]["helm.sh/chart"] == "bakehouse-9.9.9"
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"] == before["spec"]


def test_the_commands_of_the_notes_name_objects_that_there_are(helm: Helm, kube: FakeKube, example: str) -> None:
    notes = _run(helm, kube, "helm", "install", "demo", str(CHART), "-f", values_path(example))
    kubectl = [line.split() for line in notes.splitlines() if line.startswith("  kubectl")]
    named = {word for words in kubectl for word in words if re.match(r"(rayservice|service|gateway)/", word)}
    service = next(name for name in kube.names() if name.startswith("RayService/")).partition("/")[2]
    # The operator makes these two.
    made = (
        "gateway/" + service + "-gateway"
        if example == "incremental-upgrade"
        else "service/" + service + "-serve-svc"
    )
    assert named == {f"rayservice/{service}", made}
    assert all(words[1:3] == ["-n", NAMESPACE] for words in kubectl)
    assert len([line for line in notes.splitlines() if line.startswith(("  kubectl", "  curl"))]) == 3


def test_a_pool_is_widened_as_the_notes_say(helm: Helm, kube: FakeKube) -> None:
    notes = _run(helm, kube, "helm", "install", "demo", str(CHART), "-f", values_path("full"))
    patch = re.search(r"-p '(\[.*\])'", notes)
    assert patch is not None
    (operation,) = json.loads(patch[1])
    spec: object = (kube.get("RayService", NAMESPACE, "chat") or {})["spec"]["rayClusterConfig"]
    for key in operation["path"].split("/")[2:]:  # below /spec, of a RayCluster
        spec = spec[int(key)] if isinstance(spec, list) else spec[key] if isinstance(spec, dict) else None
    assert spec == 8
    assert "jsonpath='{.status.activeServiceStatus.rayClusterName}'" in notes


@pytest.mark.parametrize(
    ("example", "upgrade", "cost"),
    [
        ("minimal-cpu", "NewCluster", "1 more worker pods with 0 more GPUs until the switch"),
        ("full", "NewCluster", "4 more worker pods with 4 more GPUs until the switch"),
        ("multi-node", "NewCluster", "3 more worker pods with 16 more GPUs until the switch"),
        ("tensor-parallel-4", "None", "does not arrive (upgrade.type None)"),
    ],
)
def test_the_notes_say_what_an_upgrade_costs(
    helm: Helm, kube: FakeKube, example: str, upgrade: str, cost: str
) -> None:
    sets = ("-f", values_path(example), "--set", f"upgrade.type={upgrade}")
    assert cost in _run(helm, kube, "helm", "install", "demo", str(CHART), *sets)


def test_helm_writes_nothing_into_the_chart(helm: Helm, kube: FakeKube) -> None:
    before = {path: os.stat(path).st_mtime_ns for path in CHART.rglob("*")}
    _run(helm, kube, "helm", "install", "demo", str(CHART))
    assert {path: os.stat(path).st_mtime_ns for path in CHART.rglob("*")} == before
