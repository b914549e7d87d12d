"""Prints what drawing a token costs, and how often rounding in the logits changes it, for three kinds of noise.

`inverse` lays one uniform number a row against the cumulative distribution; `gumbel` gives every token noise of
its own; `two rounds` is what the sampler does over a whole vocabulary (`bakehouse_replica.model.noise`).

.venv/bin/python replica/benchmarks/sampling.py [--model smollm2] [--threads 2]
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import default_block_size, select_ops
from bakehouse_kernels.layout import SURVEY_BLOCK
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, ModelSource, Sample
from bakehouse_replica.model.batch import build_batch, flatten
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.noise import noise_key, race, race_of_blocks
from bakehouse_replica.model.sampler import draw
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.model.weights import load_weights
from bakehouse_replica.source import open_source
from torch import Tensor
from torch.nn import functional

Method = Callable[[Tensor, Sequence[int]], list[int]]  # the token for each key, by weights

CPU = torch.device("cpu")
N_REPEATS = 20
N_ROWS = (1, 32, 256)
N_POSITIONS = 60  # a text
N_SEEDS = 200
RELATIVE_NOISE = 1e-5  # about what another batch size, chunking or cached prefix changes in float32 logits
TEMPERATURES = (0.7, 1.0, 1.5)
REQUESTS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k 50": SamplingParams(top_k=50),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "bias and bad word": SamplingParams(logit_bias=((1, 2.0),), bad_words_ids=((2,),)),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "5 logprobs": SamplingParams(temperature=0.8, logprobs=5),
}


def inverse(weight_V: Tensor, keys: Sequence[int]) -> list[int]:
    """The inverse of the cumulative distribution, at one uniform number for each key."""
    uniform_N = torch.tensor([(key / 2**64) + 0.5 for key in keys], dtype=torch.float64)
    cumulative_V = weight_V.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(cumulative_V, uniform_N * cumulative_V[-1], right=True).tolist()


def gumbel(weight_V: Tensor, keys: Sequence[int]) -> list[int]:
    """A race of all tokens in one round."""
    shape = (len(keys), len(weight_V))
    id_NV = torch.arange(len(weight_V)).expand(shape)
    return race(weight_V.double().expand(shape), id_NV, torch.tensor(keys)).tolist()


def two_rounds(weight_V: Tensor, keys: Sequence[int]) -> list[int]:
    """A race of blocks, and one of the tokens of the block that won."""
    padded_V = functional.pad(weight_V, (0, -len(weight_V) % SURVEY_BLOCK))
    weight_BC = padded_V.view(-1, SURVEY_BLOCK).double()
    key_N = torch.tensor(keys)
    block_N = race_of_blocks(weight_BC.sum(dim=-1).expand(len(keys), -1), key_N)
    id_NC = block_N[:, None] * SURVEY_BLOCK + torch.arange(SURVEY_BLOCK)
    return race(weight_BC[block_N], id_NC, key_N).tolist()


METHODS: dict[str, Method] = {"inverse": inverse, "gumbel": gumbel, "two rounds": two_rounds}


def weights_of(logits_V: Tensor, temperature: float) -> Tensor:
    """The weights that the sampler gives to tokens."""
    return ((logits_V - logits_V.max()) / temperature).exp_()


def logits_of_a_text(model: str, ops: Ops) -> Tensor:
    """One row for each position of a text that the model writes itself at temperature 1."""
    files = open_source(ModelSource(model=model))
    spec: ModelSpec = read_spec(files)
    decoder = Decoder(spec, load_weights(files, spec, dtype=torch.float32, device=CPU), ops)
    block_size = default_block_size(CPU)
    n_blocks = N_POSITIONS // block_size + 1
    cache = ops.new_cache(
        n_layers=spec.n_layers,
        n_blocks=n_blocks,
        block_size=block_size,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
    )
    sample = Sample(params=SamplingParams(), seeds=(0,), output_index=0)
    rows: list[Tensor] = []
    token_ids: tuple[int, ...] = (1,)
    for position in range(N_POSITIONS):
        chunk = Chunk(
            sequence_id=0,
            token_ids=token_ids,
            start=position,
            block_ids=tuple(range(n_blocks)),
            sample=sample,
        )
        batch = build_batch(flatten((chunk,)), block_size=block_size, device=CPU)
        logits_RV = decoder.logits(decoder.forward(batch, cache, batch.sample_at_R))
        ((drawn,),) = draw(ops, logits_RV, [sample], [position + 1])
        token_ids = drawn.token_ids
        rows.append(logits_RV[0])
    return torch.stack(rows)


def count_flips(method: Method, logits_TV: Tensor, temperature: float) -> tuple[int, int]:
    """Of texts of one token a row under as many seeds: tokens that rounding changes, and texts with any."""
    generator = torch.Generator().manual_seed(0)
    is_flipped_TN = torch.zeros(len(logits_TV), N_SEEDS, dtype=torch.bool)
    for position, logits_V in enumerate(logits_TV):
        keys = [noise_key(seed, position) for seed in range(N_SEEDS)]
        rounding_V = torch.randn(len(logits_V), generator=generator) * RELATIVE_NOISE
        weight_V = weights_of(logits_V, temperature)
        rounded_V = weights_of(logits_V * (1 + rounding_V), temperature)
        for seed, key in enumerate(keys):
            is_flipped_TN[position, seed] = method(weight_V, [key]) != method(rounded_V, [key])
    return int(is_flipped_TN.sum()), int(is_flipped_TN.any(dim=0).sum())


def least_us(work: Callable[[], object]) -> float:
    """The fastest of some runs, in microseconds: what others do on the machine only adds."""
    work()
    times_s = []
    for _ in range(N_REPEATS):
        begun_at = perf_counter()
        work()
        times_s.append(perf_counter() - begun_at)
    return min(times_s) * 1e6


def print_costs(ops: Ops, logits_TV: Tensor) -> None:
    """What the draws of one step cost, by the number of rows and by what the requests ask for."""
    print(f"{'one step, us':>24} " + " ".join(f"{n_rows:>6} rows" for n_rows in N_ROWS))

    def draw_all(params: SamplingParams, n_rows: int) -> None:
        samples = [Sample(params=params, seeds=(index,), output_index=0) for index in range(n_rows)]
        draw(ops, rows[n_rows], samples, range(n_rows))

    rows = {n_rows: logits_TV[torch.arange(n_rows) % N_POSITIONS] for n_rows in N_ROWS}
    for name, params in REQUESTS.items():
        times = [f"{least_us(partial(draw_all, params, n_rows)):>11.0f}" for n_rows in N_ROWS]
        print(f"{name:>24} " + " ".join(times))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    ops = select_ops(CPU, torch.float32, arguments.threads)
    logits_TV = logits_of_a_text(arguments.model, ops)
    print(f"rows of {logits_TV.shape[1]}, {arguments.threads} threads")
    print_costs(ops, logits_TV)
    n_tokens = N_POSITIONS * N_SEEDS
    print(f"logits changed by {RELATIVE_NOISE:g} of themselves: of {n_tokens} tokens, and of {N_SEEDS} texts")
    for temperature in TEMPERATURES:
        for name, method in METHODS.items():
            n_flipped, n_texts = count_flips(method, logits_TV, temperature)
            print(f"{name:>12} at temperature {temperature}: {n_flipped:>5} tokens {n_texts:>4} texts change")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
