"""Grammars through an engine with a real model: they hold under forks and preemption, and end outputs."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import FinishReason, ModelSource, Request
from bakehouse_replica.engine import Engine
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import open_source
from bakehouse_replica.tokenizer_files import load_tokenizer
from bakehouse_replica.vocabulary import Vocabulary, vocabulary_of
from grammars import regex, schema
from tiny_llama import END_ID, write_tiny_llama

SEATS = schema(
    '{"type": "object", "properties": {"row": {"type": "integer", "minimum": 1, "maximum": 40}, '
    '"seat": {"enum": ["aisle", "window"]}}, "required": ["row", "seat"], "additionalProperties": false}'
)
WAIT_S = 60.0


@dataclass(slots=True)
class Output:
    """One choice, as it came."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReplicaSettings:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_llama(folder)
    return ReplicaSettings(source=ModelSource(model=str(folder)), kv_memory_bytes=8_000_000, block_size=4)


@pytest.fixture(autouse=True)
def own_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
async def engine(model: ReplicaSettings) -> AsyncIterator[Engine]:
    engine = build_engine(model, replica_id="r")
    engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def vocabulary(model: ReplicaSettings) -> Vocabulary:
    return vocabulary_of(load_tokenizer(open_source(model.source)).backend_tokenizer)


async def outputs(engine: Engine, params: SamplingParams, *, request_id: str = "a") -> list[Output]:
    collected = [Output() for _ in range(params.n)]
    async with asyncio.timeout(WAIT_S):
        async for delivery in engine.generate(Request(request_id=request_id, prompt_ids=(5, 6, 7), params=params)):
            for delta in delivery.deltas:
                collected[delta.choice].token_ids += delta.token_ids
                collected[delta.choice].finish = delta.finish or collected[delta.choice].finish
    return collected


def text_of(vocabulary: Vocabulary, output: Output) -> str:
    return b"".join(map(vocabulary.bytes_of, output.token_ids)).decode()


async def test_every_choice_matches_and_ends_without_an_end_token(engine: Engine, vocabulary: Vocabulary) -> None:
    params = SamplingParams(n=6, max_tokens=80, seed=1, grammar=SEATS)  # no stop ids at all
    choices = await outputs(engine, params)
    texts = {text_of(vocabulary, choice) for choice in choices}
    assert {choice.finish for choice in choices} == {FinishReason.STOP}
    assert len(texts) > 1
    for text in texts:
        seats = json.loads(text)
        assert 1 <= seats["row"] <= 40
        assert seats["seat"] in ("aisle", "window")


async def test_c41_preemption_changes_nothing_under_a_grammar(model: ReplicaSettings, engine: Engine) -> None:
    """Eight outputs in a pool that holds a few of them, against a pool that holds all."""
    all_params = [SamplingParams(max_tokens=60, seed=seed, grammar=SEATS) for seed in range(8)]
    roomy = [await outputs(engine, params) for params in all_params]
    tight_engine = build_engine(replace(model, kv_memory_bytes=56_000, max_model_len=80), replica_id="tight")
    n_tokens = [3 + len(output.token_ids) for (output,) in roomy]
    assert 2 * tight_engine.card.n_blocks * 4 < sum(n_tokens), "most outputs begin before there is room for all"
    tight_engine.start()
    calls = [outputs(tight_engine, params, request_id=f"r{index}") for index, params in enumerate(all_params)]
    tight = await asyncio.gather(*calls)
    await tight_engine.close()
    assert tight == roomy


async def test_a_bad_grammar_is_refused_and_the_next_request_is_served(
    engine: Engine, vocabulary: Vocabulary
) -> None:
    with pytest.raises(InvalidRequest, match="regex parse error"):
        await outputs(engine, SamplingParams(max_tokens=5, seed=1, grammar=regex("(a")))
    params = SamplingParams(max_tokens=20, seed=1, grammar=regex("[ab]{4}"), stop_token_ids=(END_ID,))
    (output,) = await outputs(engine, params)
    assert set(text_of(vocabulary, output)) <= set("ab")
    assert output.finish is FinishReason.STOP


async def test_a_script_keeps_to_grammars_too(tmp_path: Path) -> None:
    path = tmp_path / "bun.json"
    path.write_text('{"pieces": ["</s>", "yes", "no"], "eos": 0, "default": {"ids": [1]}, "prefer": [[2]]}')
    engine = build_engine(ReplicaSettings(source=ModelSource(model=f"scripted:{path}")), replica_id="s")
    engine.start()
    params = SamplingParams(max_tokens=5, seed=1, temperature=0.0, grammar=regex("no+"), stop_token_ids=(0,))
    (output,) = await outputs(engine, params)
    await engine.close()
    assert output.token_ids[0] == 2
