"""Ranks as processes of this machine: what a program gets that asks for several, and what it loses with one."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from bakehouse import LLM, SamplingParams
from bakehouse_replica.build import build_engine
from bakehouse_replica.core.types import FinishReason, ModelSource, Request
from bakehouse_replica.engine import Engine
from bakehouse_replica.settings import ReplicaSettings
from tiny_llama import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, seed=0)
PROMPTS = [list(range(3 + n, 20 + 2 * n)) for n in range(6)]
N_ENDLESS = 16_384
ENDLESS = Request(
    request_id="endless",
    prompt_ids=(5, 6, 7),
    params=SamplingParams(temperature=0.0, max_tokens=N_ENDLESS, seed=0),
)


def rank_processes() -> list[psutil.Process]:
    """Of this process's ranks 1, 2, …"""
    children = psutil.Process().children()
    return [child for child in children if "bakehouse_replica.executors.worker" in child.cmdline()]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_two_processes_give_the_tokens_of_one(tiny_llama_folder: Path, kind: str) -> None:
    quantize, dtype = ("int8", "auto") if kind == "int8" else ("none", kind)
    outputs = []
    for n_ranks in (1, 2):
        with LLM(
            str(tiny_llama_folder), tensor_parallel=n_ranks, kv_memory="8MiB", quantize=quantize, dtype=dtype
        ) as llm:
            assert len(rank_processes()) == n_ranks - 1
            outputs.append([output.token_ids for output in llm.generate(PROMPTS, GREEDY)])
    assert not rank_processes()
    alone, shared = outputs
    if kind == "float32":
        assert shared == alone
    else:  # each rank rounds its own part of a row, in steps of its own largest number
        n_equal = sum(one[0] == other[0] for one, other in zip(alone, shared, strict=True))
        assert n_equal >= len(PROMPTS) - 1, (alone, shared)


@pytest.fixture(scope="module")
def long_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers last longer than whoever reads them takes to kill a rank, however busy the cores are."""
    return write_tiny_llama(tmp_path_factory.mktemp("long-llama"), max_position_embeddings=2 * N_ENDLESS)


@contextmanager
def engine_of(model: Path, rank_timeout_s: float) -> Iterator[Engine]:
    settings = ReplicaSettings(
        source=ModelSource(model=str(model)),
        kv_memory_bytes=64 << 20,
        n_threads=2,
        tensor_parallel=2,
        rank_timeout_s=rank_timeout_s,
    )
    engine = build_engine(settings, replica_id="r")
    engine.start()
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("number", "rank_timeout_s", "message"),
    # A death is noticed at once: its limit is beyond the test's own.
    [(signal.SIGKILL, 1000.0, "rank 1 has died"), (signal.SIGSTOP, 5.0, "rank 1 has been silent for 5 s")],
    ids=["killed", "stopped"],
)
def test_a_rank_lost_in_the_midst_of_a_stream_is_named_and_none_is_left(
    long_llama_folder: Path, number: signal.Signals, rank_timeout_s: float, message: str
) -> None:
    async def stream(engine: Engine, victim: psutil.Process) -> str:
        is_lost = False
        async for delivery in engine.generate(ENDLESS):
            for delta in delivery.deltas:
                if delta.finish is not None:
                    assert delta.finish is FinishReason.ERROR
                    assert delta.failure is not None
                    return delta.failure.message
            if not is_lost:
                os.kill(victim.pid, number)
                is_lost = True
        raise AssertionError("a stream that ends without a word")

    with engine_of(long_llama_folder, rank_timeout_s) as engine:
        (rank_1,) = rank_processes()
        told = asyncio.run(stream(engine, rank_1))
        assert told == f"the engine of this replica has failed: {message}"
        assert engine.failure == told
    assert not rank_1.is_running()
