"""What the processes of a cluster are told: that this Ray reads it, and that it names what exists."""

from importlib import import_module
from pathlib import Path

import pytest
import ray
from bakehouse_cluster.serve_environment import (
    GRPC_SERVICES,
    LocalRaySettings,
    cluster_environment,
    environment,
)


def test_serve_reads_every_variable_that_a_cluster_sets_for_it() -> None:
    constants = (Path(ray.__file__).parent / "serve" / "_private" / "constants.py").read_text()
    told = {name for haproxy in (True, False) for name in cluster_environment(haproxy=haproxy)}
    assert {name for name in told if name.startswith("RAY_SERVE_") and f'"{name}"' not in constants} == set()


def test_two_rays_of_a_machine_have_no_port_of_metrics_in_common(tmp_path: Path) -> None:
    """Fails for nothing once in some 9,000 runs: a port that is free is drawn from 28,000."""
    settings = LocalRaySettings(host="127.0.0.1", port=8000, n_cpus=2, object_store_bytes=80_000_000)
    first, second = (environment(settings, tmp_path, tmp_path / "token") for _ in range(2))
    package = Path(ray.__file__).parent
    for name, module in (
        ("DASHBOARD_METRIC_PORT", "dashboard/consts.py"),
        ("AUTOSCALER_METRIC_PORT", "autoscaler/_private/constants.py"),
    ):
        assert f'{name} = env_integer("{name}"' in (package / module).read_text(), "Ray reads it"
        assert first[name] != second[name]
    assert first["DASHBOARD_METRIC_PORT"] != first["AUTOSCALER_METRIC_PORT"]


def test_what_serve_is_to_import_exists() -> None:
    for path in (cluster_environment()["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"], GRPC_SERVICES):
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize(("drain_s", "told"), [(30.0, "30"), (120, "120"), (0.5, "0.5")])
def test_a_node_that_is_told_to_go_waits_as_long_as_the_configuration_says(drain_s: float, told: str) -> None:
    assert cluster_environment(drain_s=drain_s)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == told


def test_haproxy_stands_in_front_unless_it_is_not_wanted() -> None:
    assert cluster_environment()["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    without = cluster_environment(haproxy=False)
    assert not any("HAPROXY" in name or "HA_PROXY" in name for name in without)
    assert without["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
