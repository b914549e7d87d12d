"""Settings to engine: what the card says, and what is refused at start."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import ModelSource, Request
from bakehouse_replica.settings import ReplicaSettings
from engines import collect, ids_of, request
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ReplicaSettings:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return ReplicaSettings(source=ModelSource(model=str(folder)), kv_memory_bytes=4_000_000, hash_key=b"secret")


@pytest.fixture(autouse=True)
def own_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


async def n_tokens_of(settings: ReplicaSettings, prompt_ids: tuple[int, ...] = (1, 2, 299)) -> int:
    engine = build_engine(settings, replica_id="r9")
    engine.start()
    params = SamplingParams(max_tokens=5, seed=3)
    request = Request(request_id="a", prompt_ids=prompt_ids, params=params)
    async with asyncio.timeout(60):
        deltas = [delta async for delivery in engine.generate(request) for delta in delivery.deltas]
    await engine.close()
    return sum(len(delta.token_ids) for delta in deltas)


@pytest.mark.parametrize("executor", ["model", "fake"])
async def test_an_engine_is_built_from_settings_and_serves(settings: ReplicaSettings, executor: str) -> None:
    assert executor in ("model", "fake")
    chosen = replace(settings, executor="model" if executor == "model" else "fake")
    assert await n_tokens_of(chosen) == 5


@pytest.mark.parametrize("executor", ["model", "fake"])
async def test_the_card_says_what_routers_need(settings: ReplicaSettings, executor: str) -> None:
    chosen = replace(
        settings, executor="model" if executor == "model" else "fake", served_name="loaf", max_model_len=100
    )
    engine = build_engine(chosen, replica_id="r9")
    (status,) = await engine.statuses()
    await engine.close()
    card = status.card
    assert (card.replica_id, card.model_name, card.hash_key) == ("r9", "loaf", b"secret")
    assert (card.vocabulary_size, card.max_model_len) == (300, 100)
    assert card.n_blocks * card.block_size >= card.max_model_len
    assert len(card.model_digest) == 32


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers(settings: ReplicaSettings) -> None:
    with pytest.raises(StartupError, match="128"):
        build_engine(replace(settings, kv_memory_bytes=10_000), replica_id="r9")


def test_a_context_beyond_the_model_s_own_is_refused(settings: ReplicaSettings) -> None:
    with pytest.raises(StartupError, match=r"4096.*128"):
        build_engine(replace(settings, max_model_len=4096), replica_id="r9")


def test_a_device_that_is_not_there_is_refused(settings: ReplicaSettings) -> None:
    with pytest.raises(StartupError, match="cuda"):
        build_engine(replace(settings, device="cuda"), replica_id="r9")


def test_int8_where_there_are_no_kernels_for_it_is_refused(settings: ReplicaSettings) -> None:
    with pytest.raises(StartupError, match=r"^model '.*': no int8 kernels for [^\n]*$"):
        build_engine(replace(settings, quantize="int8", device="cpu", dtype="bfloat16"), replica_id="r9")


async def test_in_bfloat16_an_engine_serves(settings: ReplicaSettings) -> None:
    assert await n_tokens_of(replace(settings, dtype="bfloat16")) == 5


async def test_keys_and_values_of_fewer_bits_are_not_those_of_float32(settings: ReplicaSettings) -> None:
    changes: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"quantize": "int8"}, {"dtype": "float32"}]
    digests = []
    for change in changes:
        engine = build_engine(replace(settings, executor="fake", **change), replica_id="r9")
        digests.append(engine.card.model_digest)
        await engine.close()
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[0]


async def test_keys_and_values_of_16_bits_are_not_those_of_32(settings: ReplicaSettings) -> None:
    digests = {}
    for kv_dtype in ("auto", "float32", "float16"):
        for quantize in ("none", "int8"):
            chosen = replace(settings, executor="fake", quantize=quantize, kv_dtype=kv_dtype)
            engine = build_engine(chosen, replica_id="r9")
            digests[kv_dtype, quantize] = engine.card.model_digest
            await engine.close()
    assert len(set(digests.values())) == 4
    assert digests["auto", "none"] == digests["float32", "none"]
    assert digests["auto", "int8"] == digests["float16", "int8"]


async def test_a_block_of_float16_takes_half_the_memory(settings: ReplicaSettings) -> None:
    n_blocks = []
    for kv_dtype in ("float32", "float16"):
        engine = build_engine(replace(settings, kv_dtype=kv_dtype), replica_id="r9")
        n_blocks.append(engine.card.n_blocks)
        await engine.close()
    assert n_blocks[1] in (2 * n_blocks[0], 2 * n_blocks[0] + 1)


@pytest.fixture
def script(tmp_path: Path) -> ReplicaSettings:
    path = tmp_path / "bun.json"
    path.write_text('{"pieces": ["a", "b"], "default": {"ids": [1, 0]}, "max_model_len": 100}')
    return ReplicaSettings(source=ModelSource(model=f"scripted:{path}"), hash_key=b"secret")


async def test_a_script_is_built_into_an_engine_and_serves(script: ReplicaSettings) -> None:
    assert await n_tokens_of(script, prompt_ids=(1, 2)) == 5


async def test_a_script_says_how_long_its_context_is_and_how_many_tokens_there_are(
    script: ReplicaSettings,
) -> None:
    engine = build_engine(script, replica_id="r9")
    await engine.close()
    card = engine.card
    assert (card.vocabulary_size, card.max_model_len, card.block_size) == (2 + 256, 100, 16)
    assert card.n_blocks == card.max_sequences * 7
    assert len(card.model_digest) == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 101}, "--max-model-len is 101"),
        (
            {"kv_memory_bytes": 1000},
            "a context of 100 tokens needs .* holds 48 tokens: lower --max-model-len to 48",
        ),
    ],
)
def test_a_script_is_refused_what_it_cannot_have(
    script: ReplicaSettings, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        build_engine(replace(script, **changes), replica_id="r9")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overlap", "is_apart", "max_flights"),
    [
        ("auto", False, 1),
        ("auto", True, 2),
        ("on", False, 2),
        ("on", True, 2),
        ("off", False, 1),
        ("off", True, 1),
    ],
)
def test_steps_overlap_where_asked_and_by_default_on_a_device_of_its_own(
    overlap: Literal["auto", "on", "off"], is_apart: bool, max_flights: int
) -> None:
    assert ReplicaSettings(overlap=overlap).max_flights(is_apart=is_apart) == max_flights


async def test_a_model_gives_the_same_ids_whether_steps_overlap_or_not(settings: ReplicaSettings) -> None:
    ids = []
    for overlap in ("on", "off"):
        engine = build_engine(replace(settings, overlap=overlap), replica_id="r9")
        engine.start()
        asked = [request(f"{n}", prompt=tuple(range(1, n)), max_tokens=12) for n in (3, 9, 20)]
        try:
            found = await asyncio.gather(*(collect(engine, each) for each in asked))
        finally:
            await engine.close()
        ids.append([ids_of(deltas) for deltas in found])
    assert ids[0] == ids[1]
    assert [len(each) for each in ids[0]] == [12, 12, 12]


def test_a_script_that_draws_several_tokens_a_step_cannot_overlap(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('{"pieces": ["a"], "default": {"ids": [0]}, "tokens_per_step": 2}')
    source = ModelSource(model=f"scripted:{tmp_path / 'script.json'}")
    with pytest.raises(StartupError, match="draws 2 tokens a step; --overlap on needs 1"):
        build_engine(ReplicaSettings(source=source, overlap="on"), replica_id="r9")
