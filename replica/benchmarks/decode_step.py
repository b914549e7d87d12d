"""Prints where the time of a decode step goes: building the batch, the forward pass, drawing the tokens.

python replica/benchmarks/decode_step.py [--model smollm2] [--context 256] [--threads 2]
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import default_block_size, select_ops
from bakehouse_kernels.layout import KVCache
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, ModelSource, Sample
from bakehouse_replica.model.batch import BatchTensors, build_batch
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.sampler import draw
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.source import open_source
from torch import Tensor

CPU = torch.device("cpu")
BLOCK_SIZE = default_block_size(CPU)
N_SEQUENCES = (1, 8, 32)
N_REPEATS = 20


def median_ms(work: Callable[[], object]) -> float:
    """The median of some runs, in milliseconds, after one that does not count."""
    work()
    times_s = []
    for _ in range(N_REPEATS):
        begun_at = perf_counter()
        work()
        times_s.append(perf_counter() - begun_at)
    return statistics.median(times_s) * 1e3


def decode_chunks(n_sequences: int, n_context: int, params: SamplingParams) -> tuple[Chunk, ...]:
    """One new token for each sequence, at the end of a context of `n_context` tokens in blocks of its own."""
    n_blocks = n_context // BLOCK_SIZE + 1
    return tuple(
        Chunk(
            sequence_id=index,
            token_ids=(index + 1,),
            start=n_context,
            block_ids=tuple(range(index * n_blocks, (index + 1) * n_blocks)),
            sample=Sample(params=params, seeds=(index,), output_index=0),
        )
        for index in range(n_sequences)
    )


def decode(decoder: Decoder, batch: BatchTensors, cache: KVCache) -> Tensor:
    """The logits after each chunk."""
    return decoder.logits(decoder.forward(batch, cache)[batch.sample_at_R])


def measure(decoder: Decoder, cache: KVCache, n_sequences: int, n_context: int) -> str:
    """One line of the table."""
    chunks = decode_chunks(n_sequences, n_context, SamplingParams(temperature=0.0))
    batch = build_batch(chunks, block_size=BLOCK_SIZE, device=CPU)
    logits_RV = decode(decoder, batch, cache)

    def draw_all(params: SamplingParams) -> None:
        samples = [Sample(params=params, seeds=(index,), output_index=0) for index in range(n_sequences)]
        draw(logits_RV, samples, [n_context + 1] * n_sequences)

    batch_ms = median_ms(lambda: build_batch(chunks, block_size=BLOCK_SIZE, device=CPU))
    forward_ms = median_ms(lambda: decode(decoder, batch, cache))
    greedy_ms = median_ms(lambda: draw_all(SamplingParams(temperature=0.0)))
    top_p_ms = median_ms(lambda: draw_all(SamplingParams(temperature=0.8, top_p=0.9)))
    tokens_per_s = n_sequences / (batch_ms + forward_ms + greedy_ms) * 1e3
    times = f"{batch_ms:>7.2f} {forward_ms:>8.2f} {greedy_ms:>7.2f} {top_p_ms:>7.2f}"
    return f"{n_sequences:>9} {times} {tokens_per_s:>9.0f}"


def written_cache(decoder: Decoder, ops: Ops, spec: ModelSpec, n_context: int) -> KVCache:
    """A cache with the same context for each sequence, written by the model: its logits are like text's."""
    n_blocks = n_context // BLOCK_SIZE + 1
    cache = KVCache.allocate(
        n_layers=spec.n_layers,
        n_blocks=max(N_SEQUENCES) * n_blocks,
        block_size=BLOCK_SIZE,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    (chunk,) = decode_chunks(1, n_context, SamplingParams(temperature=0.8))
    for position in range(n_context):
        batch = build_batch((replace(chunk, start=position),), block_size=BLOCK_SIZE, device=CPU)
        assert chunk.sample is not None
        ((drawn,),) = draw(decode(decoder, batch, cache), [chunk.sample], [position + 1])
        chunk = replace(chunk, token_ids=drawn.token_ids)
    target_C = torch.arange(n_blocks, max(N_SEQUENCES) * n_blocks)
    ops.copy_blocks(cache, target_C % n_blocks, target_C)
    return cache


def main() -> None:
    """Measures and prints one line per number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    files = open_source(ModelSource(model=arguments.model))
    spec = read_spec(files)
    ops = select_ops(CPU, torch.float32, arguments.threads)
    decoder = Decoder(spec, load_weights(files, spec, dtype=torch.float32, device=CPU), ops)
    cache = written_cache(decoder, ops, spec, arguments.context)

    print(f"{files.name}, {arguments.threads} threads, context of {arguments.context} tokens; median ms a step")
    print(f"{'sequences':>9} {'batch':>7} {'forward':>8} {'greedy':>7} {'top_p':>7} {'tokens/s':>9}")
    for n_sequences in N_SEQUENCES:
        print(measure(decoder, cache, n_sequences, arguments.context))


if __name__ == "__main__":
    main()
