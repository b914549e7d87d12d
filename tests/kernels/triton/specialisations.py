"""What Triton would compile for launches of a server after its warm-up, as JSON; needs no GPU.

TRITON_INTERPRET=0 python -m tests.kernels.triton.specialisations

The model's shapes are fixed; numbers of rows, chunks, copies and places are random, and what the host sends stands
at any word of one array, as in the replica's staging.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from bakehouse_kernels.layout import DrawTensors, LogitChanges
from bakehouse_kernels.triton.activation import gated
from bakehouse_kernels.triton.ahead import launches_of
from bakehouse_kernels.triton.attention_plan import plan_attention
from bakehouse_kernels.triton.cache import new_cache
from bakehouse_kernels.triton.copy_blocks import copy_blocks
from bakehouse_kernels.triton.int8_matmul import int8_matmul, quantised
from bakehouse_kernels.triton.paged_attention import paged_attention
from bakehouse_kernels.triton.penalties import adjust
from bakehouse_kernels.triton.rms_norm import rms_norm
from bakehouse_kernels.triton.rope_write import rope_and_write
from bakehouse_kernels.triton.sample import draw
from torch import Tensor

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
N_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WIDTH, N_IDS = 4, 2, 64, 16, 256, 1003
N_SERVED = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One step: chunks (query rows, context length), draws, copies, changed places, first word of what is sent."""

    chunks: tuple[tuple[int, int], ...]
    n_draws: int = 1
    n_copies: int = 1
    n_places: int = 1
    word: int = 0
    shares: bool = False


@dataclass(slots=True)
class Sent:
    """An array of words from which tensors are taken one after the other, each at the next whole word."""

    at: int
    words: Tensor = field(default_factory=lambda: torch.zeros(1 << 14, dtype=torch.int64))

    def take(self, n: int, dtype: torch.dtype = torch.int64) -> Tensor:
        n_words = -(-n * dtype.itemsize // 8)
        taken = self.words[self.at : self.at + n_words].view(dtype)[:n]
        self.at += n_words
        return taken


class Model:
    """Weights and a cache, whose addresses do not change."""

    def __init__(self) -> None:
        self.gain = torch.ones(WIDTH, dtype=DTYPE)
        self.qkv = quantised(torch.ones(WIDTH, (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM))
        self.out = quantised(torch.ones(WIDTH, WIDTH))
        self.bias = torch.ones(WIDTH, dtype=DTYPE)
        self.cache = new_cache(
            n_layers=1,
            n_blocks=4,
            block_size=BLOCK_SIZE,
            n_kv_heads=N_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=DTYPE,
            device=CPU,
        )

    def step(self, shape: Shape) -> Callable[[], None]:
        sent, n_rows = Sent(shape.word), sum(n for n, _ in shape.chunks)
        x, angles = torch.zeros(n_rows, WIDTH, dtype=DTYPE), torch.zeros(n_rows, HEAD_DIM)
        slots, logits = sent.take(n_rows), torch.zeros(shape.n_draws, N_IDS)
        n_blocks = max(-(-context // BLOCK_SIZE) for _, context in shape.chunks)
        tables = torch.arange(n_blocks * len(shape.chunks), dtype=torch.int32).view(-1, n_blocks)
        starts = torch.tensor([0, *(n for n, _ in shape.chunks)]).cumsum(0).int()
        contexts = torch.tensor([context for _, context in shape.chunks], dtype=torch.int32)
        if shape.shares:
            tables = tables[:1].repeat(len(tables), 1)
        asks, changes = asks_of(sent, shape.n_draws), changes_of(sent, shape.n_places)
        source, target = sent.take(shape.n_copies), sent.take(shape.n_copies)

        def call() -> None:
            copy_blocks(self.cache, source, target)
            qkv = int8_matmul(rms_norm(x, self.gain, 1e-5), self.qkv)
            q = rope_and_write(qkv, angles, angles, self.cache, 0, slots)
            plan = plan_attention(tables, starts, contexts, block_size=BLOCK_SIZE, device=CPU)
            attended = paged_attention(q, self.cache, 0, plan, scale=0.125)
            int8_matmul(attended.flatten(1), self.out, self.bias, x)
            gated(x)
            adjust(logits, changes)
            draw(logits, asks)

        return call


def asks_of(sent: Sent, n: int) -> DrawTensors:
    return DrawTensors(
        key_R=sent.take(n),
        top_p_R=sent.take(n, torch.float64),
        min_p_R=sent.take(n, torch.float64),
        temperature_R=sent.take(n, torch.float32),
        top_k_R=sent.take(n, torch.int32),
    )


def changes_of(sent: Sent, n: int) -> LogitChanges:
    return LogitChanges(
        repetition_R=sent.take(1, torch.float32),
        presence_R=sent.take(1, torch.float32),
        frequency_R=sent.take(1, torch.float32),
        row_C=sent.take(n, torch.int32),
        id_C=sent.take(n, torch.int32),
        is_seen_C=sent.take(n, torch.bool),
        count_C=sent.take(n, torch.int32),
        bias_C=sent.take(n, torch.float32),
    )


# Each range of rows that the launch tables tell apart, prompts, decode rows alone, and such as share blocks.
WARM_UP = (
    Shape(chunks=((1, 1100),) * 12, shares=True),
    Shape(chunks=((20, 20), (1, 600))),
    Shape(chunks=((100, 100),)),
)


def served(random: torch.Generator) -> Shape:
    """A step of any sizes; one in three is of decode rows alone."""

    def number(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=random))

    only_decode = number(3) == 1
    rows = [1 if only_decode or number(2) == 1 else number(64) for _ in range(number(20))]
    return Shape(
        chunks=tuple((n, n + number(1500)) for n in rows),
        n_draws=number(40),
        n_copies=number(20),
        n_places=number(40),
        word=number(9),
        shares=number(2) == 1,
    )


def main() -> None:
    model, random = Model(), torch.Generator().manual_seed(1)
    warm, names = set(), set()
    for shape in WARM_UP:
        for one in launches_of(model.step(shape), "sm90"):
            warm.add(one.key)
            names.add(one.name)
    shapes = [served(random) for _ in range(N_SERVED)]
    new = {one.key for shape in shapes for one in launches_of(model.step(shape), "sm90")} - warm
    print(json.dumps({"kernels": sorted(names), "n_warm": len(warm), "compiled_while_serving": sorted(new)}))


if __name__ == "__main__":
    main()
