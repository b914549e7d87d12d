"""Decode steps played from recordings equal those whose operations are called, to the bit."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from bakehouse_kernels.cpu.ops import CpuOps
from bakehouse_kernels.cpu.packing import WeightFormat
from bakehouse_kernels.layout import KVCache
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, Sample
from bakehouse_replica.model.batch import BatchTensors, build_batch, flatten
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.recorded import RecordedSteps
from decoding import BLOCK_SIZE, CPU, load, open_model
from tiny_llama import N_TOKENS, random_model, tiny_config

SAMPLE = Sample(params=SamplingParams(), seeds=(0,), output_index=0)
N_STEPS = 40
N_BLOCKS = 8 * (N_STEPS // BLOCK_SIZE + 1) + 64


def chunks_of(starts: dict[int, int], random: Random) -> tuple[Chunk, ...]:
    """One token more for each sequence; sequence s has the blocks s, s + 8, s + 16, ..."""
    return tuple(
        Chunk(
            sequence_id=s,
            token_ids=(random.randrange(N_TOKENS),),
            start=start,
            block_ids=tuple(range(s, N_BLOCKS, 8))[: start // BLOCK_SIZE + 1],
            sample=SAMPLE,
        )
        for s, start in starts.items()
    )


def both_ways(
    folder: Path, weight_format: WeightFormat, **fields: object
) -> tuple[Decoder, RecordedSteps, KVCache, KVCache]:
    """A decoder, its recordings, the cache that these have, and another one for calls."""
    random_model(tiny_config(**fields)).save_pretrained(folder / "model")
    spec, weights = load(open_model(folder / "model", folder / "cache"))
    ops = CpuOps(torch.get_num_threads(), weight_format=weight_format)
    called, played = (
        ops.new_cache(
            n_layers=spec.n_layers,
            n_blocks=N_BLOCKS,
            block_size=BLOCK_SIZE,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
        )
        for _ in range(2)
    )
    decoder = Decoder(spec, weights, ops)
    return decoder, RecordedSteps(decoder, played, ops), played, called


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 1}],
    ids=["", "biases", "mqa"],
)
def test_steps_of_sequences_that_come_and_go_are_equal(
    weight_format: WeightFormat, fields: dict[str, object], tmp_path: Path
) -> None:
    decoder, recorded, _, called = both_ways(tmp_path, weight_format, **fields)
    random = Random(11)
    lengths = dict.fromkeys(range(8), 0)
    for _ in range(N_STEPS):
        running = sorted(random.sample(range(8), random.randint(1, 8)))
        flat = flatten(chunks_of({s: lengths[s] for s in running}, random))
        batch = build_batch(flat, block_size=BLOCK_SIZE, device=CPU)
        for s in running:
            lengths[s] += 1
        assert torch.equal(recorded.forward(batch), decoder.forward(batch, called))


@pytest.mark.parametrize("n_blocks", [64, 65, 130])
def test_a_context_may_have_any_number_of_blocks(n_blocks: int, tmp_path: Path) -> None:
    decoder, recorded, played, called = both_ways(tmp_path, "float32", max_position_embeddings=1024)
    random = Random(n_blocks)
    lengths = (BLOCK_SIZE * n_blocks - 1, BLOCK_SIZE)
    block_ids = (tuple(range(N_BLOCKS - 1, N_BLOCKS - 1 - n_blocks, -1)), (0, 1))

    def batch_of(starts: Sequence[int], ends: Sequence[int]) -> BatchTensors:
        chunks = tuple(
            Chunk(
                sequence_id=s,
                token_ids=tuple(random.choices(range(N_TOKENS), k=end - start)),
                start=start,
                block_ids=block_ids[s][: -(-end // BLOCK_SIZE)],
                sample=SAMPLE,
            )
            for s, (start, end) in enumerate(zip(starts, ends, strict=True))
        )
        return build_batch(flatten(chunks), block_size=BLOCK_SIZE, device=CPU)

    before = batch_of((0, 0), lengths)
    for cache in (called, played):
        decoder.forward(before, cache)
    step = batch_of(lengths, [length + 1 for length in lengths])
    assert torch.equal(recorded.forward(step), decoder.forward(step, called))
