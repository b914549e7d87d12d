"""The document that deploys a configuration: what stands where in it, and that Ray takes it."""

from pathlib import Path

import pytest
import servecheck
import yaml
from bakehouse_cluster.cli import app
from bakehouse_cluster.config import Config, parse_config
from bakehouse_cluster.config_sections import GatewaySection, ReplicaSection
from bakehouse_cluster.serve_config import MOVED, Target, serve_config
from bakehouse_replica.core.errors import ConfigError
from bakehouse_replica.settings import LIVE_LIMITS as REPLICA_LIMITS
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_router.settings import LIVE_LIMITS as GATEWAY_LIMITS
from bakehouse_router.settings import GatewaySettings
from typer.testing import CliRunner

TENSOR_PARALLEL: dict[str, object] = {
    "model": {"source": "org/model", "device": "cuda", "max_model_len": 8192},
    "replica": {"tensor_parallel": 4, "pools": ["gpu"], "kv_memory": "40GiB", "cpus": 8},
    "gateway": {"pools": ["cpu"]},
    "server": {"grpc_port": 9000},
}
EVERYTHING: dict[str, object] = {
    "model": {"source": "org/model", "device": "cuda"},
    "replica": {
        "pools": ["gpu-a", "gpu-b"],
        "overlap": True,
        "max_prefill_tokens": 1024,
        "autoscale": {"min_replicas": 1, "max_replicas": 8, "target_requests": 32, "upscale_delay_s": 10},
    },
    "gateway": {"pools": ["cpu"], "keys": "/keys/keys.yaml", "max_queued_tokens": 2_000_000, "max_choices": 4},
    "server": {"host": "127.0.0.2", "port": 8001, "gateways": 2, "drain_s": 120},
}
TREES = {"nothing": {}, "tensor parallel": TENSOR_PARALLEL, "everything": EVERYTHING}


def application(tree: dict[str, object], target: Target = "kubernetes") -> dict[str, object]:
    applications = serve_config(tree, target)["applications"]
    assert isinstance(applications, list)
    (only,) = applications
    assert isinstance(only, dict)
    return only


def deployments(tree: dict[str, object]) -> tuple[object, object]:
    """Those of gateways and of replicas."""
    found = application(tree)["deployments"]
    assert isinstance(found, list)
    gateway, replica = found
    return gateway, replica


@pytest.mark.parametrize("target", ["kubernetes", "laptop"])
@pytest.mark.parametrize("name", TREES)
def test_ray_takes_the_document_and_knows_every_key_of_it(name: str, target: Target) -> None:
    text = yaml.safe_dump(serve_config(TREES[name], target))
    assert servecheck.check(text) == []


def test_the_check_knows_an_unknown_key_when_it_sees_one() -> None:
    text = yaml.safe_dump(serve_config({}, "kubernetes")).replace("num_replicas", "num_replica")
    assert [said.partition(":")[0] for said in servecheck.check(text)] == [
        "$.applications[0].deployments[0].num_replica",
        "$.applications[0].deployments[1].num_replica",
    ]


def test_the_defaults_make_a_document_without_a_single_option() -> None:
    assert serve_config({}, "kubernetes") == {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "tracing_config": {"enabled": False},
        "applications": [
            {
                "name": "bakehouse",
                "route_prefix": "/",
                "import_path": "bakehouse:build",
                "args": {},
                "deployments": [
                    {"name": "Gateway", "num_replicas": 1, "user_config": {}},
                    {"name": "Replica", "num_replicas": 1, "user_config": {}},
                ],
            }
        ],
    }


def test_what_can_change_in_place_stands_in_the_deployments_and_all_else_in_the_arguments_as_written() -> None:
    assert application(EVERYTHING)["args"] == {
        "model": {"source": "org/model", "device": "cuda"},
        "replica": {"pools": ["gpu-a", "gpu-b"], "overlap": True},
        "gateway": {"pools": ["cpu"], "keys": "/keys/keys.yaml"},
        "server": {"host": "127.0.0.2", "port": 8001, "drain_s": 120},
    }
    gateway, replica = deployments(EVERYTHING)
    assert gateway == {
        "name": "Gateway",
        "num_replicas": 2,
        "user_config": {"max_queued_tokens": 2_000_000, "max_choices": 4},
    }
    assert replica == {
        "name": "Replica",
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 8,
            "target_ongoing_requests": 34,  # and a subscription of each gateway
            "upscale_delay_s": 10,
            "downscale_delay_s": 600,
        },
        "user_config": {"max_prefill_tokens": 1024},
    }


def test_the_target_decides_who_is_reached_and_whether_pools_count_and_nothing_else() -> None:
    cluster, laptop = serve_config(EVERYTHING, "kubernetes"), serve_config(EVERYTHING, "laptop")
    assert (laptop.pop("proxy_location"), cluster.pop("proxy_location")) == ("HeadOnly", "EveryNode")
    assert laptop.pop("http_options") == {"host": "127.0.0.2", "port": 8001}
    assert cluster.pop("http_options") == {"host": "0.0.0.0", "port": 8001}
    without_pools: dict[str, object] = {
        section: {key: value for key, value in part.items() if key != "pools"}
        for section, part in EVERYTHING.items()
        if isinstance(part, dict)
    }
    assert laptop["applications"] == [application(without_pools)]


def test_grpc_is_offered_where_it_has_a_port() -> None:
    assert serve_config(TENSOR_PARALLEL, "kubernetes")["grpc_options"] == {
        "port": 9000,
        "grpc_servicer_functions": ["bakehouse_router.grpc_ingress.add_services"],
    }
    assert "grpc_options" not in serve_config({"server": {"grpc_port": None}}, "kubernetes")


@pytest.mark.parametrize("name", TREES)
def test_the_arguments_are_a_configuration_that_lacks_only_what_was_moved(name: str) -> None:
    args, whole = parse_config(application(TREES[name])["args"]), parse_config(TREES[name])
    assert args.model == whole.model
    for section, moved in MOVED.items():
        kept = set(type(getattr(whole, section)).model_fields) - set(moved)
        assert getattr(args, section).model_dump(include=kept) == getattr(whole, section).model_dump(include=kept)


def test_the_tree_is_not_changed() -> None:
    before = yaml.safe_dump(EVERYTHING)
    args = application(EVERYTHING)["args"]
    assert isinstance(args, dict)
    args["gateway"]["pools"].append("another")
    assert yaml.safe_dump(EVERYTHING) == before


def test_live_limits_are_keys_and_settings_of_the_same_name() -> None:
    for names, section, settings in (
        (GATEWAY_LIMITS, GatewaySection, GatewaySettings),
        (REPLICA_LIMITS, ReplicaSection, ReplicaSettings),
    ):
        assert set(names) <= set(section.model_fields)
        assert set(names) <= set(settings.__dataclass_fields__)
    for section_name, moved in MOVED.items():
        assert set(moved) <= set(type(getattr(Config(), section_name)).model_fields)


@pytest.mark.parametrize("command", ["render", "check"])
def test_unknown_keys_are_refused_with_their_path(tmp_path: Path, command: str) -> None:
    path = tmp_path / "bakehouse.yaml"
    path.write_text("replica: {autoscale: {min_replicas: 1, max_replicas: 2, target_requests: 8, max: 3}}")
    result = CliRunner().invoke(app, ["config", command, "--config", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("replica.autoscale.max: unknown key; known here: min_replicas, ")


def test_the_command_prints_the_document_and_says_when_a_configuration_is_good(tmp_path: Path) -> None:
    path = tmp_path / "bakehouse.yaml"
    path.write_text(yaml.safe_dump(EVERYTHING))
    printed = CliRunner().invoke(app, ["config", "render", "--config", str(path), "--target", "laptop"])
    assert yaml.safe_load(printed.output) == serve_config(EVERYTHING, "laptop")
    checked = CliRunner().invoke(app, ["config", "check", "--config", str(path)])
    assert (checked.output, checked.exit_code) == (f"{path}: good\n", 0)
