"""Times the launches of Triton kernels on this GPU and writes its table: `python -m bakehouse_kernels.tune`.

Run offline, when kernels or devices change: a served process only reads tables. Attention is timed as whole steps,
in which its kernels follow one another. `--write` replaces the committed table; otherwise it is printed.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from triton.errors import TritonError
from triton.testing import do_bench

from bakehouse_kernels.triton.cases import (
    Case,
    Make,
    activation,
    attention,
    copies,
    draws,
    int8_product,
    norm,
    penalties,
    rope,
    rows_to_int8,
)
from bakehouse_kernels.triton.launch import (
    TABLES,
    Entry,
    Launch,
    Table,
    device_class_of,
    table_of,
    trying,
    written,
)

LEAST_GAIN = 0.02  # what is faster by less than that is noise, and the table stays as it is

Limits = Mapping[str, int]
Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of a call; raises `RuntimeError` where it does not fit the device."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is timed of a kernel for an entry with these limits, and the values to try by option."""

    case: Callable[[Limits], Case]
    options: Mapping[str, tuple[int, ...]]


def _attention(
    limits: Limits, n_sequences: int, n_queries: int, context_len: int, *, shares: bool = False
) -> Case:
    dtype = torch.bfloat16 if limits.get("element_bytes", 4) == 2 else torch.float32
    head_dim = limits.get("head_pad", 256)
    return attention(n_sequences, n_queries, context_len, head_dim=head_dim, dtype=dtype, shares=shares)


_WARPS = (1, 2, 4, 8, 16)
TUNED: Mapping[str, Tuned] = {
    "paged_attention": Tuned(
        lambda limits: _attention(limits, 1, 4096, 4096),
        {"BLOCK_M": (16, 32, 64, 128), "num_stages": (1, 2, 3, 4)},
    ),
    "split_decode": Tuned(
        lambda limits: _attention(limits, 64, 1, 8192),
        {"PROGRAMS": (132, 264, 396, 528), "num_stages": (2, 3, 4, 5)},
    ),
    # How long a split is, SPLIT, decides over sums and over what is shared: it is no matter of speed alone.
    "combine_splits": Tuned(
        lambda limits: _attention(limits, 64, 1, 8192), {"BLOCK_S": (4, 8, 16), "num_warps": (1, 2, 4)}
    ),
    # Warps and BLOCK_N are those of `split_decode`, so that sums are the same; 64 rows would be summed otherwise.
    "shared_prefix": Tuned(
        lambda limits: _attention(limits, 64, 1, 8192, shares=True),
        {"BLOCK_M": (16, 32), "PROGRAMS": (132, 264, 396, 528), "num_stages": (1, 2, 3, 4)},
    ),
    "rope_write": Tuned(lambda _: rope(32, 8, 128), {"BLOCK_H": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8)}),
    "copy_blocks": Tuned(lambda _: copies(), {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)}),
    "rms_norm": Tuned(lambda limits: norm(limits.get("width", 16_384)), {"num_warps": _WARPS}),
    "activation": Tuned(lambda _: activation(14_336), {"BLOCK": (256, 512, 1024, 2048), "num_warps": (2, 4, 8)}),
    "quantise_rows": Tuned(lambda limits: rows_to_int8(limits.get("width", 14_336)), {"num_warps": _WARPS}),
    "int8_matmul": Tuned(
        lambda limits: int8_product(limits.get("rows", 4096)),
        {
            "BLOCK_M": (16, 32, 64, 128),
            "BLOCK_N": (32, 64, 128),
            "BLOCK_K": (64, 128, 256),
            "num_warps": (4, 8),
            "num_stages": (2, 3, 4, 5),
        },
    ),
    "adjust": Tuned(lambda _: penalties(), {"BLOCK": (64, 128, 256, 512), "num_warps": (1, 2, 4)}),
    # With more warps a draw's threads have too few registers, and spill.
    "sample": Tuned(lambda _: draws(128_256), {"BLOCK": (2048, 4096), "num_warps": (4, 8)}),
}


def candidates(launch: Launch, options: Mapping[str, tuple[int, ...]]) -> list[Launch]:
    """The launch itself, then all others with the values to try."""
    found = [launch]
    for values in product(*options.values()):
        given = {**launch.options, **dict(zip(options, values, strict=True))}
        num_warps, num_stages = given.pop("num_warps"), given.pop("num_stages")
        candidate = Launch(tiles=given, num_warps=num_warps, num_stages=num_stages)
        if candidate != launch:
            found.append(candidate)
    return found


def fastest(launches: list[Launch], time_of: Callable[[Launch], float]) -> tuple[Launch, float]:
    """The launch that takes the least time, with that; the first one unless another is faster by `LEAST_GAIN`.

    Launches that do not fit the device are passed over. Raises `RuntimeError` where none does.
    """
    best: tuple[Launch, float] | None = None
    for index, launch in enumerate(launches):
        try:
            elapsed_ms = time_of(launch)
        except RuntimeError:
            continue
        # Only the first is defended against noise, not the best of those that have beaten it.
        limit = float("inf") if best is None else best[1]
        if index > 0 and best is not None and best[0] is launches[0]:
            limit *= 1 - LEAST_GAIN
        if elapsed_ms < limit:
            best = launch, elapsed_ms
    if best is None:
        raise RuntimeError(f"none of {len(launches)} launches fits the device")
    return best


def tuned(table: Table, time_of: Timer, make: Make, report: Callable[[str], None]) -> Table:
    """The table with each launch replaced by the fastest; `report` gets a line for each."""
    found = dict(table)
    for op, tuning in TUNED.items():
        for index, entry in enumerate(table[op]):
            time_by = _time_by(found, op, index, time_of, tuning.case(entry.up_to)(make))
            launch, elapsed_ms = fastest(candidates(entry.launch, tuning.options), time_by)
            found = _with(found, op, index, launch)
            limits = ", ".join(f"{name} <= {limit}" for name, limit in entry.up_to.items())
            report(f"{op}{f' ({limits})' if limits else ''}: {elapsed_ms:.4f} ms by {launch.options}")
    return found


def _time_by(
    table: Table, op: str, index: int, time_of: Timer, call: Callable[[], object]
) -> Callable[[Launch], float]:
    def time_by(launch: Launch) -> float:
        with trying(_with(table, op, index, launch)):
            return time_of(call)

    return time_by


def _with(table: Table, op: str, index: int, launch: Launch) -> dict[str, tuple[Entry, ...]]:
    entries = list(table[op])
    entries[index] = replace(entries[index], launch=launch)
    return {**table, op: tuple(entries)}


def main() -> None:
    """Tune for the GPU of this process."""
    if not torch.cuda.is_available():
        sys.exit(f"tuning times kernels on a GPU; torch {torch.__version__} sees none")
    device = torch.device("cuda")
    device_class = device_class_of(device)

    def time_of(call: Callable[[], object]) -> float:
        try:
            elapsed_ms: float = do_bench(call, return_mode="median")
        except TritonError as exc:
            raise RuntimeError(str(exc)) from exc
        return elapsed_ms

    table = tuned(table_of(device_class), time_of, Make(device), lambda line: print(line, flush=True))
    if sys.argv[1:] == ["--write"]:
        (TABLES / f"{device_class}.json").write_text(written(table))
    else:
        print(written(table), end="")


if __name__ == "__main__":
    main()
