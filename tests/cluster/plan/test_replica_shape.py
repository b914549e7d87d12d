"""What a replica would be is what it is when it starts."""

from dataclasses import replace
from pathlib import Path

import pytest
from bakehouse_cluster.config import Config, parse_config
from bakehouse_cluster.plan.cost_file import CostFile
from bakehouse_cluster.plan.fleet import GatewayShape
from bakehouse_cluster.plan.replica_shape import gateway_shape, replica_shape
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.errors import ConfigError, StartupError
from bakehouse_replica.executors.simulated import StepCost
from tiny_llama import N_TOKENS, tiny_config

ON_CPU = CostFile(cost=StepCost(step_s=1.0), device="cpu", model="tiny")
ON_GPU = CostFile(cost=StepCost(step_s=1.0), device="cuda", model="tiny")
MEASURED = replace(ON_CPU, weights="float32", n_ranks=1)
MIB = 1024**2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration alone: no weights are needed for a plan."""
    path = tmp_path_factory.mktemp("model")
    tiny_config().save_pretrained(path)
    return path


def config(folder: Path, *, model: dict[str, object] | None = None, **replica: object) -> Config:
    source = {"source": str(folder), "weights": "dummy"}
    return parse_config({"model": source | (model or {}), "replica": {"kv_memory": "1MiB"} | replica})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "kv_memory": "2MiB",
            "block_size": 16,
            "max_sequences": 5,
            "max_step_tokens": 99,
            "max_prefill_tokens": 33,
        },
        {"overlap": "on", "max_waiting_requests": 7},
    ],
)
async def test_it_is_what_an_engine_has_after_its_start(
    folder: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = config(folder, model={"device": "cpu"}, **changes)
    shape = replica_shape(tree, ON_CPU)
    engine = build_engine(tree.replica_settings(hash_key=b""), replica_id="r")
    card = engine.card
    await engine.close()
    assert shape.policy == engine.policy
    assert (shape.capacity.n_blocks, shape.capacity.block_size) == (card.n_blocks, card.block_size)
    assert shape.capacity.n_blocks * shape.capacity.block_bytes == card.kv_bytes
    assert (shape.capacity.max_sequences, shape.vocabulary_size) == (card.max_sequences, N_TOKENS)
    assert shape.capacity.max_flights == (2 if changes.get("overlap") == "on" else 1)
    assert shape.capacity.max_step_tokens == changes.get("max_step_tokens", 512)
    assert shape.cost == ON_CPU.cost


def test_a_gpu_has_its_own_sizes_and_a_block_that_belongs_to_nobody(folder: Path) -> None:
    capacity = replica_shape(config(folder), ON_GPU).capacity
    # Two layers, two KV heads of 16, keys and values of 2 bytes in bfloat16, blocks of 16 tokens.
    assert capacity.block_bytes == 2 * 2 * 2 * 16 * 2 * 16
    assert capacity.n_blocks == MIB // capacity.block_bytes - 1
    assert (capacity.block_size, capacity.max_flights, capacity.max_step_tokens) == (16, 2, 8192)


def test_ranks_share_the_memory_that_is_given(folder: Path) -> None:
    alone, shared = (replica_shape(config(folder, tensor_parallel=n), ON_CPU).capacity for n in (1, 2))
    assert shared.n_blocks == alone.n_blocks
    with pytest.raises(StartupError, match="3"):
        replica_shape(config(folder, tensor_parallel=3), ON_CPU)


@pytest.mark.parametrize(
    ("model", "replica", "cost", "said"),
    [
        ({}, {"kv_memory": None}, ON_CPU, "replica.kv_memory: not given"),
        ({"device": "cuda"}, {}, ON_CPU, "model.device: it is cuda, but the cost was measured on cpu"),
        ({"device": "cpu"}, {}, ON_GPU, "model.device: it is cpu, but the cost was measured on cuda"),
        ({}, {"executor": "fake"}, ON_CPU, "replica.executor: only a model"),
        ({"quantize": "int8"}, {}, MEASURED, "products would be in int8, but the cost was measured in float32"),
        ({}, {"tensor_parallel": 2}, MEASURED, "it is 2, but the cost was measured with 1"),
        (
            {},
            {},
            replace(ON_CPU, shape="9 layers"),
            "model.source: .* has 2 layers of .* with tiny: 9 layers; cal",
        ),
        (
            {},
            {},
            replace(ON_CPU, cost=StepCost(pair_s=1e299)),
            r"a step of 256 prompt tokens and a decode at the end of a context of 256 takes 3.29e\+303 s; "
            "the limit is 3600 s",
        ),
        ({"source": "scripted:x.yaml"}, {}, ON_CPU, "replica.executor: only a model"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    folder: Path, model: dict[str, object], replica: dict[str, object], cost: CostFile, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        replica_shape(config(folder, model=model, **replica), cost)


def test_what_could_not_start_is_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(StartupError, match="a context of 256 tokens needs"):
        replica_shape(config(folder, kv_memory="4KiB"), ON_CPU)
    with pytest.raises(StartupError, match="--max-model-len is 1000"):
        replica_shape(config(folder, model={"max_model_len": 1000}), ON_CPU)


def test_queues_are_those_of_the_configuration() -> None:
    tree = parse_config(
        {"gateway": {"max_queued_requests": 3, "max_queued_tokens": 99}, "server": {"gateways": 2}}
    )
    assert gateway_shape(tree) == GatewayShape(n_gateways=2, max_queued_requests=3, max_queued_tokens=99)


def test_a_cost_that_was_measured_on_such_a_replica_is_taken(folder: Path) -> None:
    assert replica_shape(config(folder), MEASURED) == replica_shape(config(folder), ON_CPU)
