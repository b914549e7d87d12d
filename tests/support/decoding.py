"""Drives a decoder through its paged cache, chunk by chunk, and asks transformers for the same logits."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import select_ops
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Capacity, Chunk, ModelSource, Sample
from bakehouse_replica.executors.in_process import build_executor
from bakehouse_replica.model.batch import build_batch, flatten
from bakehouse_replica.model.constraint import ConstraintSource
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import DecoderWeights, load_weights
from bakehouse_replica.source import ModelFiles, open_source
from torch import Tensor
from transformers import PreTrainedModel

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def open_model(path: Path, cache_root: Path) -> ModelFiles:
    return open_source(ModelSource(model=str(path)), cache_root=cache_root)


def load(files: ModelFiles, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, DecoderWeights]:
    spec = read_spec(files)
    return spec, load_weights(files, spec, dtype=dtype, device=CPU)


def executor_of(files: ModelFiles, *, n_blocks: int, constraints: ConstraintSource | None = None) -> Executor:
    """The model in float32 on the CPU's own kernels, with blocks of `BLOCK_SIZE`."""
    spec, weights = load(files)
    return build_executor(
        spec=spec,
        weights=weights,
        ops=select_ops(CPU, torch.float32, torch.get_num_threads()),
        capacity=Capacity(n_blocks=n_blocks, block_size=BLOCK_SIZE, max_step_tokens=512, max_sequences=32),
        constraints=constraints,
    )


def paged_logits(
    spec: ModelSpec,
    weights: DecoderWeights,
    sequences: Sequence[Sequence[int]],
    chunk_sizes: Sequence[int],
    ops: Ops | None = None,
) -> list[dict[int, Tensor]]:
    """Logits after the last token of each chunk, per sequence and position, by `ops` or the reference's.

    In step i every unfinished sequence advances by `chunk_sizes[i]` tokens, the last size repeating; the blocks
    of all sequences are scattered over the pool.
    """
    n_blocks = [-(-len(ids) // BLOCK_SIZE) for ids in sequences]
    order = Random(0).sample(range(sum(n_blocks)), sum(n_blocks))
    tables = [tuple(order.pop() for _ in range(n)) for n in n_blocks]
    ops = ops or ReferenceOps(dtype=weights.embedding_VE.dtype)
    cache = ops.new_cache(
        n_layers=spec.n_layers,
        n_blocks=sum(n_blocks),
        block_size=BLOCK_SIZE,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
    )
    decoder = Decoder(spec, weights, ops)
    found: list[dict[int, Tensor]] = [{} for _ in sequences]
    starts, step = [0] * len(sequences), 0
    while active := [s for s, ids in enumerate(sequences) if starts[s] < len(ids)]:
        size = chunk_sizes[min(step, len(chunk_sizes) - 1)]
        ends = {s: min(starts[s] + size, len(sequences[s])) for s in active}
        chunks = tuple(
            Chunk(
                sequence_id=s,
                token_ids=tuple(sequences[s][starts[s] : ends[s]]),
                start=starts[s],
                block_ids=tables[s][: -(-ends[s] // BLOCK_SIZE)],
                sample=Sample(params=SamplingParams(), seeds=(0,), output_index=0),
            )
            for s in active
        )
        batch = build_batch(flatten(chunks), block_size=BLOCK_SIZE, device=CPU)
        logits_RV = decoder.logits(decoder.forward(batch, cache)[batch.sample_at_R])
        for row, s in enumerate(active):
            found[s][ends[s] - 1] = logits_RV[row]
            starts[s] = ends[s]
        step += 1
    return found


@torch.inference_mode()
def assert_logits_equal(
    found: list[dict[int, Tensor]], model: PreTrainedModel, sequences: Sequence[Sequence[int]], atol: float
) -> None:
    for positions, ids in zip(found, sequences, strict=True):
        expected_TV = model(torch.tensor([list(ids)])).logits[0].float()
        assert max(positions) == len(ids) - 1
        for position, logits_V in positions.items():
            torch.testing.assert_close(logits_V, expected_TV[position], atol=atol, rtol=0)
