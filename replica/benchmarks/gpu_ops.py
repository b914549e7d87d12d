"""Every operation on the device against its definition in float64."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import DrawTensors, LogitChanges
from bakehouse_kernels.reference_draw import draw as defined_draw
from torch import Tensor
from torch.nn import functional

BLOCK_SIZE = 16
EPS = 1e-5
# Rows and weights rounded to 8 bits are off by 2^-8 of the largest of their row or column; sums average it out.
INT8_ALLOWED = 2**-5


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key heads and their size, and how they attend."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        ways = (" window" if self.window else "") + (" softcap" if self.softcap else "")
        return f"{self.n_heads}/{self.n_kv_heads}x{self.head_dim}{ways}"


# Each size, group of query heads and way once or more, not all by all: each compiles four kernels, some 4 s.
HEADS = (
    Heads(8, 2, 64),
    Heads(8, 2, 64, window=24),
    Heads(8, 2, 64, softcap=5.0),
    Heads(16, 1, 64),
    Heads(9, 3, 80, window=24, softcap=5.0),
    Heads(32, 8, 128),
    Heads(2, 2, 256, softcap=5.0),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """How far an operation is from its definition, in shares of the largest number, and how far it may be."""

    name: str
    error: float
    allowed: float

    @property
    def is_good(self) -> bool:
        """NaN is not."""
        return self.error <= self.allowed


class OpChecks:
    """Checks of one `Ops`, and of one whose products are in 8 bits; `dtype` is that of their inputs."""

    def __init__(
        self, ops: Ops, int8_ops: Ops, device: torch.device, dtype: torch.dtype, *, is_tiny: bool
    ) -> None:
        self._ops = ops
        self._int8_ops = int8_ops
        self._device = device
        self._dtype = dtype
        self._scale = 1 if is_tiny else 16
        # Two roundings to the 8 bits of a bfloat16, or float32 sums of thousands of terms.
        self._allowed = 2**-6 if dtype == torch.bfloat16 else 1e-4
        self._random = torch.Generator(device=device).manual_seed(1)

    def all(self) -> Iterator[Callable[[], list[Checked]]]:
        """Each is a check; one that raises has failed, and the others go on."""
        yield from (self._products, self._int8_products, self._activations, self._norms)
        yield from (lambda heads=heads: self._attention(heads) for heads in HEADS)
        yield from (self._copies, self._draws, self._changes)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self._device).to(self._dtype)

    def _compared(self, name: str, found: Tensor, expected: Tensor, allowed: float | None = None) -> Checked:
        difference = (found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        title = f"{name} {str(self._dtype).removeprefix('torch.')}"
        return Checked(title, float(difference), self._allowed if allowed is None else allowed)

    def _products(self) -> list[Checked]:
        checked = []
        for n_rows in (1, 7, 64 * self._scale):
            x, weight, bias = (
                self._normal(n_rows, 64 * self._scale),
                self._normal(64 * self._scale, 96),
                self._normal(96),
            )
            weight = weight / x.shape[1] ** 0.5
            packed, exact = self._ops.pack(weight), x.double() @ weight.double()
            checked.append(
                self._compared(f"linear of {n_rows}", self._ops.linear(x, packed, bias), exact + bias.double())
            )
            total = self._normal(n_rows, 96)
            expected = total.double() + exact
            self._ops.add_linear(total, x, packed)
            checked.append(self._compared(f"add_linear of {n_rows}", total, expected))
            gate, up = exact.chunk(2, dim=1)
            found = self._ops.gated_linear(x, self._ops.pack_gated(weight))
            checked.append(self._compared(f"gated_linear of {n_rows}", found, functional.silu(gate) * up))
        return checked

    def _int8_products(self) -> list[Checked]:
        """Each way in which products of few, some and many rows are launched."""
        checked = []
        weight = self._normal(64 * self._scale, 96) / (64 * self._scale) ** 0.5
        packed = self._int8_ops.pack(weight)
        for n_rows in (1, 33, 20 * self._scale):
            x, total = self._normal(n_rows, 64 * self._scale), self._normal(n_rows, 96)
            exact = x.double() @ weight.double()
            found = self._int8_ops.linear(x, packed)
            checked.append(self._compared(f"int8 linear of {n_rows}", found, exact, INT8_ALLOWED))
            expected = total.double() + exact
            self._int8_ops.add_linear(total, x, packed)
            checked.append(self._compared(f"int8 add_linear of {n_rows}", total, expected, INT8_ALLOWED))
        return checked

    def _activations(self) -> list[Checked]:
        """Both gates; GELU, which no model here asks for, has no other definition than torch's."""
        if self._device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return []
        # The CPU's operations do without triton, which exists for Linux only.
        from bakehouse_kernels.triton.activation import gated

        gate_up = self._normal(5, 2 * 120 * self._scale) * 3
        gate, up = gate_up.double().chunk(2, dim=1)
        return [
            self._compared("silu", gated(gate_up, "silu"), functional.silu(gate) * up),
            self._compared("gelu", gated(gate_up, "gelu"), functional.gelu(gate, approximate="tanh") * up),
        ]

    def _norms(self) -> list[Checked]:
        x, weight = self._normal(5, 256 * self._scale), self._normal(256 * self._scale)
        exact = x.double() / (x.double().square().mean(dim=1, keepdim=True) + EPS).sqrt() * weight.double()
        return [self._compared("rms_norm", self._ops.rms_norm(x, weight, EPS), exact)]

    def _attention(self, heads: Heads) -> list[Checked]:
        """Chunks of prompts, decode rows, and rows that share their first blocks; all written before."""
        checked = []
        long = 40 * self._scale
        # Twelve rows of two whole splits in common on a GPU: enough that the kernel for shared blocks is launched.
        sharers = tuple(2 * long + k for k in range(12))
        for name, lengths, n_queries, n_shared in (
            ("mixed", (5, 33, long, 1), (5, 20, 9, 1), 0),
            ("decode", (1, 17, long, 2 * long), (1, 1, 1, 1), 0),
            ("shared", sharers, (1,) * len(sharers), 8 * long // 5 // BLOCK_SIZE),
        ):
            found, expected = self._attended(heads, lengths, n_queries, n_shared)
            checked.append(self._compared(f"attention {name} {heads}", found, expected))
        return checked

    def _attended(
        self, heads: Heads, lengths: tuple[int, ...], n_queries: tuple[int, ...], n_shared: int
    ) -> tuple[Tensor, Tensor]:
        n_kv_heads, head_dim = heads.n_kv_heads, heads.head_dim
        width = (heads.n_heads + 2 * n_kv_heads) * head_dim
        n_blocks_each = -(-max(lengths) // BLOCK_SIZE)
        tables = torch.randperm(len(lengths) * n_blocks_each, generator=torch.Generator().manual_seed(2))
        tables = tables.view(len(lengths), n_blocks_each).int()
        tables[:, :n_shared] = tables[0, :n_shared]
        cache = self._ops.new_cache(
            n_layers=1, n_blocks=tables.numel(), block_size=BLOCK_SIZE, n_kv_heads=n_kv_heads, head_dim=head_dim
        )
        expected, queries = [], []
        shared = self._normal(n_shared * BLOCK_SIZE, width)
        for s, (length, n) in enumerate(zip(lengths, n_queries, strict=True)):
            rows = self._normal(length, width)
            rows[: len(shared)] = shared[:length]
            position = torch.arange(length)
            cos, sin = self._rotation(position, head_dim)
            slots = tables[s, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
            q = self._ops.rope_and_write(rows, cos, sin, cache, 0, slots.to(self._device))
            queries.append(q[length - n :])
            expected.append(_exact_attention(rows, cos, sin, n, heads))
        starts = torch.tensor([0, *torch.tensor(n_queries).cumsum(0).tolist()], dtype=torch.int32)
        plan = self._ops.plan_attention(tables, starts, torch.tensor(lengths, dtype=torch.int32))
        found = self._ops.paged_attention(
            torch.cat(queries),
            cache,
            0,
            plan,
            scale=head_dim**-0.5,
            window=heads.window,
            softcap=heads.softcap,
        )
        return found, torch.cat(expected)

    def _rotation(self, position: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        frequency = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(position.float(), frequency).repeat(1, 2).to(self._device)
        return angles.cos(), angles.sin()

    def _copies(self) -> list[Checked]:
        cache = self._ops.new_cache(n_layers=2, n_blocks=9, block_size=BLOCK_SIZE, n_kv_heads=2, head_dim=64)
        for tensor in (*cache.key, *cache.value):
            tensor.copy_(self._normal(*tensor.shape))
        expected = [tensor.double() for tensor in (*cache.key, *cache.value)]
        source, target = (torch.tensor(ids, device=self._device) for ids in ((1, 1, 7), (0, 5, 8)))
        for tensor in expected:
            tensor[target] = tensor[source]
        self._ops.copy_blocks(cache, source, target)
        found = torch.stack([tensor.double() for tensor in (*cache.key, *cache.value)])
        return [self._compared("copy_blocks", found, torch.stack(expected))]

    def _draws(self) -> list[Checked]:
        """Ids must be those of the definition, which computes each row for itself; surveys its best ids."""
        n_rows, n_vocabulary = 24, 8000 * self._scale
        logits = torch.randn(n_rows, n_vocabulary, generator=self._random, device=self._device) * 3
        row = torch.arange(n_rows, device=self._device)
        asks = DrawTensors(
            temperature_R=torch.where(row % 4 == 0, 0.0, 0.8).float(),
            top_k_R=torch.where(row % 4 == 1, 20, 0).int(),
            top_p_R=torch.where(row % 4 == 2, 0.9, 1.0).double(),
            min_p_R=torch.where(row % 3 == 1, 0.02, 0.0).double(),
            key_R=row * 0x123456789ABCDEF,
        )
        wrong = int((self._ops.draw(logits, asks) != defined_draw(logits, asks)).sum())
        found = self._ops.survey(logits, torch.ones(n_rows, device=self._device), 8)
        best = logits.double().topk(8, dim=1)
        weights = (logits.double() - best.values[:, :1]).exp().sum(dim=1)
        return [
            Checked("draw, wrong ids", float(wrong), 0.0),
            Checked("survey, wrong ids", float((found.id_RK != best.indices).sum()), 0.0),
            Checked("survey, weights", float(((found.total_R - weights) / weights).abs().max()), 1e-5),
        ]

    def _changes(self) -> list[Checked]:
        logits = torch.randn(3, 500, generator=self._random, device=self._device)
        one = torch.tensor([1.3, 1.0, 0.7], device=self._device)
        changes = LogitChanges(
            repetition_R=one,
            presence_R=one - 1,
            frequency_R=one / 4,
            row_C=torch.tensor([0, 1, 2, 2], dtype=torch.int32, device=self._device),
            id_C=torch.tensor([4, 499, 0, 7], dtype=torch.int32, device=self._device),
            is_seen_C=torch.tensor([True, True, False, True], device=self._device),
            count_C=torch.tensor([2, 0, 0, 1], dtype=torch.int32, device=self._device),
            bias_C=torch.tensor([0.0, 2.0, -1.0, 0.5], device=self._device),
        )
        expected = logits.double()
        for row, id_, is_seen, count, bias in zip(
            *(
                tensor.tolist()
                for tensor in (changes.row_C, changes.id_C, changes.is_seen_C, changes.count_C, changes.bias_C)
            ),
            strict=True,
        ):
            value = float(expected[row, id_])
            repetition = float(one[row])
            if is_seen:
                value = value / repetition if value > 0 else value * repetition
            if count:
                value -= float(changes.presence_R[row]) + float(changes.frequency_R[row]) * count
            expected[row, id_] = value + bias
        self._ops.adjust(logits, changes)
        return [self._compared("adjust", logits, expected)]


def _exact_attention(rows: Tensor, cos: Tensor, sin: Tensor, n: int, heads: Heads) -> Tensor:
    """Of the last `n` rows of a context, in float64; `[n, N, D]`."""
    length, head_dim = len(rows), cos.shape[1]
    sizes = (heads.n_heads, heads.n_kv_heads, heads.n_kv_heads)
    q, k, v = rows.double().view(length, -1, head_dim).split(sizes, dim=1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * cos.double().unsqueeze(1) + turned * sin.double().unsqueeze(1)

    q, k = rotated(q)[length - n :], rotated(k)
    k, v = (x.repeat_interleave(heads.n_heads // heads.n_kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qnd,lnd->nql", q, k) * head_dim**-0.5
    if heads.softcap is not None:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    key, query = (
        torch.arange(length, device=rows.device),
        torch.arange(length - n, length, device=rows.device)[:, None],
    )
    visible = key <= query
    if heads.window is not None:
        visible &= key > query - heads.window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("nql,lnd->qnd", weights, v)
