"""The table that `gpu.py` prints last."""

from collections.abc import Iterator, Mapping
from typing import Any

Records = Mapping[str, Mapping[str, Any]]


def table(records: Records, problems: Mapping[str, str]) -> str:
    """One line a measurement; what is missing is missing."""
    return "\n".join(_lines(records, problems))


def _lines(records: Records, problems: Mapping[str, str]) -> Iterator[str]:
    limits = records["limits"]
    if "limits" in limits:
        found = limits["limits"]
        yield (
            f"{limits['device']}, torch {limits['torch']}: {found['bytes_per_s'] / 1e12:.2f} TB/s, "
            f"{found['operations_per_s'] / 1e12:.0f} TFLOP/s in bfloat16 products"
        )
    checks = records["ops"].get("checks", [])
    yield f"operations against float64: {sum(one['is_good'] for one in checks)} of {len(checks)} right"
    yield f"{'shape':12} {'what':24} {'ms':>9} {'floor ms':>9} {'ratio':>6} {'idle':>6}"
    for name, record in records.items():
        if name.startswith("steps-"):
            yield from _steps(name.removeprefix("steps-"), record, records)
    for name, problem in problems.items():
        yield f"FAILED {name}: {problem}"


def _steps(shape: str, record: Mapping[str, Any], records: Records) -> Iterator[str]:
    for one in record.get("decode", []):
        what = f"decode {one['batch']} x {one['context']}"
        yield (
            f"{shape:12} {what:24} {1e3 * one['step_s']:9.3f} {1e3 * one['floor_s']:9.3f} {one['ratio']:6.2f} "
            f"{one['idle_share']:6.1%}"
        )
    for one in record.get("skipped", []):
        what = f"decode {one['batch']} x {one['context']}"
        yield f"{shape:12} {what:24} skipped: {one['why']}"
    for one in record.get("prefill", []):
        what = f"prefill {one['n_prompts']} x {one['n_tokens']}"
        yield (
            f"{shape:12} {what:24} {1e3 * one['step_s']:9.3f} {1e3 * one['step_s'] * one['ratio']:9.3f} "
            f"{one['ratio']:6.2f}"
        )
    if "breakdown_ms" in record:
        parts = ", ".join(
            f"{part} {value:.3f}" for part, value in record["breakdown_ms"].items() if part != "context"
        )
        yield f"{shape:12} ms a decode step: {parts}"
    served, peer = record.get("served"), records.get(f"peer-{shape}", {})
    if served and peer.get("n_output"):
        own, other = served["n_output"] / served["total_s"], peer["n_output"] / peer["total_s"]
        attention = peer["attention"]
        yield (
            f"{shape:12} served {own:.0f} tokens/s; transformers with {attention} {other:.0f}; "
            f"{own / other:.2f} times"
        )
