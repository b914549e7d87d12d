"""Every example renders with helm 4 and 3 into objects that API server, operator and Ray would take."""

import subprocess
import sys
from pathlib import Path

import chartcheck
import pytest
import yaml
from charts import CHART, EXAMPLES, Helm, values_path

HERE = Path(__file__).parent
# The oldest that Chart.yaml allows, and the newest that there are schemas for.
KUBERNETES = ("1.29", chartcheck.KUBE)


def test_there_is_an_example_of_each_kind() -> None:
    kinds = {"minimal-cpu", "one-gpu", "tensor-parallel-4", "autoscaling", "air-gapped", "full"}
    assert kinds <= set(EXAMPLES)


def test_the_oldest_kubernetes_is_the_charts() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={KUBERNETES[0]}.0-0"


def test_lint_is_content(each_helm: Helm, example: str) -> None:
    done = each_helm.run("lint", "--strict", str(CHART), "-f", values_path(example))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("crds", "promtool")
@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_api_server_and_operator_would_take_it(helm: Helm, example: str, kubernetes: str) -> None:
    manifest = helm.template(example, options=("--kube-version", kubernetes))
    assert chartcheck.check_text(manifest, kube=kubernetes) == []
    assert not chartcheck.CEL_NOT_RUN


@pytest.mark.usefixtures("crds", "promtool")
def test_the_check_refuses_whatever_is_broken_in_the_fullest_manifest(helm: Helm, tmp_path: Path) -> None:
    manifest = tmp_path / "full.yaml"
    manifest.write_text(helm.template("full"))
    command = [sys.executable, str(HERE / "tools" / "chart_mutants.py"), str(manifest), "--least", "49"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "49 of 49 mutations refused" in done.stdout


def test_both_helms_render_the_same(helm: Helm, helm_3: Helm, example: str) -> None:
    assert helm.objects(example) == helm_3.objects(example)
