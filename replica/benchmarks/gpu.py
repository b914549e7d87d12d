"""How fast the GPU path is, and how far from what the device allows; needs no Ray.

    PYTHONPATH=replica:kernels python replica/benchmarks/gpu.py --out FOLDER

Each section runs in a process of its own with a deadline: what fails or is late is reported, does not take the
others along, and makes the exit status 1. Everything measured stands in FOLDER as JSON; the table comes last.
`--device cpu --tiny` runs all of it in small, by the reference's operations, to try the script itself.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.dispatch import select_ops
from bakehouse_kernels.reference import QuantisedReferenceOps, ReferenceOps
from gpu_limits import Limits, measured_limits
from gpu_ops import OpChecks
from gpu_peer import run_peer
from gpu_shapes import SHAPES, open_shape
from gpu_steps import Bench, decoded_record
from gpu_table import table

TOTAL_S = 470.0  # of 8 minutes
# Of the memory left beside the weights, for keys and values; the rest is for a step and for recordings.
CACHE_SHARE = 0.8
LARGEST_CACHE_BYTES = 90 * 10**9

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is measured, where."""

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool
    out: Path

    @property
    def batches(self) -> tuple[int, ...]:
        """Sequences that decode together."""
        return (1, 3) if self.is_tiny else (1, 16, 64, 256)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens that each of them has."""
        return (20, 60) if self.is_tiny else (512, 8192)

    @property
    def prompts(self) -> list[list[int]]:
        """What is served in the comparison."""
        n_prompts, length = (3, 20) if self.is_tiny else (64, 512)
        return [[(31 * s + 7 * i) % 290 + 5 for i in range(length)] for s in range(n_prompts)]

    @property
    def n_output(self) -> int:
        """Tokens that follow each prompt."""
        return 6 if self.is_tiny else 128

    def ops(self, dtype: torch.dtype) -> Ops:
        """Those under test."""
        if self.device.type == "cpu":
            return ReferenceOps(dtype=dtype)
        return select_ops(self.device, dtype, 1)

    def int8_ops(self, dtype: torch.dtype) -> Ops:
        """The same with products in 8 bits."""
        if self.device.type == "cpu":
            return QuantisedReferenceOps(dtype=dtype)
        return select_ops(self.device, dtype, 1, quantize="int8")

    def limits(self) -> Limits:
        """As the section `limits` has found them."""
        return Limits(**read(self, "limits")["limits"])


def read(setup: Setup, section: str) -> Record:
    """What a section has written; empty where it has not."""
    path = setup.out / f"{section}.json"
    found: Record = json.loads(path.read_text()) if path.is_file() else {}
    return found


def write(setup: Setup, section: str, record: Record) -> None:
    """After each measurement, so that a deadline loses nothing."""
    (setup.out / f"{section}.json").write_text(json.dumps(record, indent=1))


def run_limits(setup: Setup, record: Record) -> None:
    """What the device can do."""
    is_gpu = setup.device.type == "cuda"
    record["device"] = torch.cuda.get_device_name(setup.device) if is_gpu else "cpu"
    record["torch"] = torch.__version__
    record["limits"] = asdict(measured_limits(setup.device, is_tiny=setup.is_tiny))


def run_ops(setup: Setup, record: Record) -> None:
    """Every operation against float64; raises where one is wrong."""
    record["checks"], record["broken"] = [], []
    for dtype in (torch.float32, torch.bfloat16):
        checks = OpChecks(setup.ops(dtype), setup.int8_ops(dtype), setup.device, dtype, is_tiny=setup.is_tiny)
        for check in checks.all():
            try:
                record["checks"] += [asdict(one) | {"is_good": one.is_good} for one in check()]
            except Exception:
                record["broken"].append(traceback.format_exc())
            write(setup, "ops", record)
    bad = [one["name"] for one in record["checks"] if not one["is_good"]]
    if bad or record["broken"]:
        raise RuntimeError(f"wrong: {', '.join(bad) or 'none'}; raised: {len(record['broken'])}")


def run_shape(name: str, setup: Setup, record: Record) -> None:
    """Decode and prefill of one shape, and the comparison's own side."""
    limits, section = setup.limits(), f"steps-{name}"
    bench = _bench(name, setup)
    record |= {"loaded_s": bench.loaded_s, "recorded_s": bench.recorded_s, "n_blocks": bench.n_blocks}
    record |= {"decode": [], "prefill": [], "skipped": []}
    decoded = {}
    for context in setup.contexts:
        for batch in setup.batches:
            if not bench.holds(batch, context):
                record["skipped"].append({"batch": batch, "context": context, "why": "keys and values do not fit"})
                continue
            decoded[batch, context] = bench.decode(batch, context, limits)
            record["decode"].append(decoded_record(decoded[batch, context]))
            write(setup, section, record)
    served = bench.serve(setup.prompts, 2)  # compiles what prompts need
    served = bench.serve(setup.prompts, setup.n_output)
    record["served"] = {"total_s": served.total_s, "n_output": served.n_output}
    batch, context = len(setup.prompts), setup.contexts[0]
    record["breakdown_ms"] = bench.breakdown(served, batch, context, decoded[batch, context])
    write(setup, section, record)
    longest = setup.contexts[-1]
    for n_prompts, n_tokens in (
        (1, setup.contexts[0]),
        (longest // setup.contexts[0], setup.contexts[0]),
        (1, longest // 2),
        (1, longest),
    ):
        record["prefill"].append(asdict(bench.prefill(n_prompts, n_tokens, limits)))
        write(setup, section, record)


def _bench(name: str, setup: Setup) -> Bench:
    files = open_shape(name, setup.out / name, is_tiny=setup.is_tiny)
    cache_bytes = 1 << 22
    if setup.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(setup.device)
        weight_bytes = 18 * 10**9 if name == "llama-3-8b" else 2 * 10**9
        cache_bytes = min(LARGEST_CACHE_BYTES, int((free_bytes - weight_bytes) * CACHE_SHARE))
    return Bench(
        files,
        setup.ops(setup.dtype),
        setup.device,
        setup.dtype,
        batches=setup.batches,
        max_context=setup.contexts[-1],
        max_step_tokens=max(setup.contexts[-1], max(setup.batches)),
        cache_bytes=cache_bytes,
    )


def run_peer_section(name: str, setup: Setup, record: Record) -> None:
    """transformers' side of the comparison."""
    open_shape(name, setup.out / name, is_tiny=setup.is_tiny)
    peer = run_peer(setup.out / name, setup.prompts, setup.n_output, setup.device, setup.dtype)
    record |= asdict(peer)


def sections() -> dict[str, tuple[float, Callable[[Setup, Record], None]]]:
    """Each by its name, with the seconds it may take; the most important first."""

    def shape(name: str) -> Callable[[Setup, Record], None]:
        return lambda setup, record: run_shape(name, setup, record)

    def peer(name: str) -> Callable[[Setup, Record], None]:
        return lambda setup, record: run_peer_section(name, setup, record)

    large, small = SHAPES
    return {
        "limits": (40.0, run_limits),
        f"steps-{large}": (130.0, shape(large)),
        "ops": (100.0, run_ops),
        f"peer-{large}": (90.0, peer(large)),
        f"steps-{small}": (90.0, shape(small)),
        f"peer-{small}": (60.0, peer(small)),
    }


def run_section(name: str, setup: Setup) -> int:
    """In this process; its exit status."""
    _, run = sections()[name]
    record: Record = {}
    try:
        run(setup, record)
    except Exception:
        record["error"] = traceback.format_exc()
    write(setup, name, record)
    return 1 if "error" in record else 0


def run_all(setup: Setup, names: list[str], arguments: list[str]) -> int:
    """Each of these sections in a process of its own, then the table of all there are; the exit status."""
    ends_at, problems = perf_counter() + TOTAL_S, {}
    try:
        setup.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--out {setup.out}: {error.strerror}")
        return 2
    for name in names:
        budget_s, _ = sections()[name]
        (setup.out / f"{name}.json").unlink(missing_ok=True)
        left_s = min(budget_s, ends_at - perf_counter())
        if left_s < 5:
            problems[name] = "no time was left"
            continue
        begun_at = perf_counter()
        try:
            command = [sys.executable, __file__, *arguments, "--section", name]
            status = subprocess.run(command, timeout=left_s, check=False).returncode
            if status != 0:
                error = read(setup, name).get("error", f"ended with status {status}")
                problems[name] = str(error).strip().splitlines()[-1]
                print(error, file=sys.stderr)
        except subprocess.TimeoutExpired:
            problems[name] = f"not done after {left_s:.0f} s"
        print(f"{name}: {problems.get(name, 'done')} ({perf_counter() - begun_at:.0f} s)", flush=True)
    records = {name: read(setup, name) for name in sections()}
    (setup.out / "all.json").write_text(json.dumps({"problems": problems, "sections": records}, indent=1))
    print(table(records, problems))
    return 1 if problems else 0


def main() -> int:
    """Parses the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=tuple(sections()), nargs="+", help="these sections, in their order")
    parser.add_argument("--section", choices=tuple(sections()), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU; `--device cpu --tiny` tries the script itself")
    setup = Setup(
        device=torch.device(options.device),
        dtype=torch.float32 if options.device == "cpu" else torch.bfloat16,
        is_tiny=options.tiny,
        out=options.out.resolve(),
    )
    if options.section is not None:
        status = run_section(options.section, setup)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # not to wait for threads that libraries leave running
    return run_all(setup, options.only or list(sections()), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
