"""The real helm and kubectl, and other projects' CRDs."""

import os
import shutil
from pathlib import Path

import pytest
from charts import EXAMPLES, Helm, real_helm

CRDS = "BAKEHOUSE_CRDS"
WHERE_CRDS_ARE = f"""{CRDS} names no folder of CRDs, as YAML or JSON, one a file, from
KubeRay v1.7.0, ray-operator/config/crd/bases/: ray.io_rayservices, ray.io_rayclusters;
Prometheus Operator v0.93.0, example/prometheus-operator-crd/: podmonitors, prometheusrules;
Gateway API v1.6.1, config/crd/standard/: gateways, httproutes, grpcroutes"""


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Helm 4, with kubectl beside it."""
    return real_helm("4")


@pytest.fixture(scope="session")
def helm_3() -> Helm:
    return real_helm("3")


@pytest.fixture(scope="session", params=["4", "3"])
def each_helm(request: pytest.FixtureRequest) -> Helm:
    """One after the other."""
    helm: Helm = request.getfixturevalue("helm" if request.param == "4" else "helm_3")
    return helm


@pytest.fixture(scope="session", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> str:
    """Each file of `helm/ci/`."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def crds() -> Path:
    """The folder of CRDs, by which the checks judge."""
    if CRDS not in os.environ:
        pytest.skip(WHERE_CRDS_ARE)
    folder = Path(os.environ[CRDS])
    assert folder.is_dir(), WHERE_CRDS_ARE
    return folder


@pytest.fixture(scope="session")
def promtool() -> str:
    """It checks PromQL; Debian's package prometheus has it."""
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    return binary
