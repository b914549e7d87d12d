"""What Ray is told to reserve."""

import pytest
from bakehouse_cluster.app import build, have_gpus, pool_selector, rank_bundle
from bakehouse_cluster.config import parse_config
from ray import serve


@pytest.mark.parametrize(
    ("model", "replica", "has_gpus", "wanted"),
    [
        ({}, {"cpus": 2}, False, {"CPU": 2.0}),
        ({}, {"cpus": 2}, True, {"CPU": 2.0, "GPU": 1.0}),
        ({"device": "cpu"}, {"cpus": 2}, True, {"CPU": 2.0}),
        ({"device": "cuda"}, {"cpus": 2}, False, {"CPU": 2.0, "GPU": 1.0}),  # Ray waits for one to join
        ({}, {"cpus": 2, "tensor_parallel": 3}, True, {"CPU": 0.6666, "GPU": 1.0}),
        ({}, {"cpus": 2, "executor": "fake"}, True, {"CPU": 2.0}),
        ({"source": "scripted:file.json"}, {"cpus": 2}, True, {"CPU": 2.0}),
    ],
)
def test_each_rank_gets_its_share_of_cpus_and_a_gpu_where_it_runs_on_one(
    model: dict[str, object], replica: dict[str, object], has_gpus: bool, wanted: dict[str, float]
) -> None:
    assert rank_bundle(parse_config({"model": model, "replica": replica}), has_gpus=has_gpus) == wanted


def node(n_gpus: float = 0, *, pool: str | None = None, is_alive: bool = True) -> dict[str, object]:
    """What `ray.nodes` says of one."""
    labels = {} if pool is None else {"bakehouse/pool": pool}
    return {"Alive": is_alive, "Resources": {"CPU": 2.0} | ({"GPU": n_gpus} if n_gpus else {}), "Labels": labels}


@pytest.mark.parametrize(
    ("nodes", "pools", "has_gpus"),
    [
        ([], [], False),
        ([node(), node(4)], [], True),
        ([node(), node(4, is_alive=False)], [], False),
        ([node(pool="cpu"), node(4, pool="gpu")], ["cpu"], False),  # there a GPU would be waited for for ever
        ([node(pool="cpu"), node(4, pool="gpu")], ["cpu", "gpu"], True),
        ([node(4)], ["gpu"], False),
    ],
)
def test_gpus_count_where_replicas_may_run(
    nodes: list[dict[str, object]], pools: list[str], has_gpus: bool
) -> None:
    assert have_gpus(nodes, pools) is has_gpus


@pytest.mark.parametrize(
    ("pools", "selector"),
    [
        ([], {}),
        (["gpu"], {"bakehouse/pool": "gpu"}),
        (["gpu-a", "gpu-b"], {"bakehouse/pool": "in(gpu-a,gpu-b)"}),
    ],
)
def test_nodes_are_chosen_by_the_label_of_their_pool(pools: list[str], selector: dict[str, str]) -> None:
    assert pool_selector(pools) == selector


def deployments(tree: dict[str, object]) -> tuple[serve.Deployment, serve.Deployment]:
    """Those of gateways and of replicas, as `build` makes them."""
    gateway = build(parse_config(tree))._bound_deployment
    (replica,) = [part for part in gateway.init_args if isinstance(part, serve.Application)]
    return gateway, replica._bound_deployment


def test_pools_and_autoscaling_reach_serve_beside_what_it_is_told_anyway() -> None:
    autoscale = {"min_replicas": 2, "max_replicas": 8, "target_requests": 32}
    gateway, replica = deployments(
        {
            "replica": {"pools": ["gpu"], "autoscale": autoscale},
            "gateway": {"pools": ["cpu"]},
            "server": {"gateways": 2},
        }
    )
    for deployment, pool in ((gateway, "cpu"), (replica, "gpu")):
        options = deployment.ray_actor_options
        assert options is not None
        assert options["label_selector"] == {"bakehouse/pool": pool}
        assert options["runtime_env"]["env_vars"]["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] == "0"
    scaling = replica._deployment_config.autoscaling_config
    assert scaling is not None
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 8, 34)


@pytest.mark.parametrize(("asked", "strategy"), [({}, "STRICT_PACK"), ({"rank_placement": "pack"}, "PACK")])
def test_the_ranks_of_a_replica_are_one_placement_group_on_one_node_unless_it_may_span_several(
    asked: dict[str, str], strategy: str
) -> None:
    _, replica = deployments({"replica": {"tensor_parallel": 3, "cpus": 1.5, **asked}})
    placement = replica._replica_config
    assert placement.placement_group_strategy == strategy
    assert placement.placement_group_bundles == [{"CPU": 0.5}] * 3


def test_all_ranks_of_a_replica_are_in_its_pools() -> None:
    _, replica = deployments({"replica": {"pools": ["a", "b"], "tensor_parallel": 3}})
    placement = replica._replica_config
    assert placement.placement_group_bundle_label_selector == [{"bakehouse/pool": "in(a,b)"}] * 3
    assert "label_selector" not in (replica.ray_actor_options or {})
