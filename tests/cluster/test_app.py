"""What Ray is told to reserve."""

import pytest
from bakehouse_cluster.app import rank_bundle
from bakehouse_cluster.config import parse_config


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
