"""What the scheduler costs per step: CPU milliseconds of `plan` + `apply`, and of the batch built from the plan.

PYTHONPATH=replica:kernels .venv/bin/python replica/benchmarks/scheduler_step.py [--profile]

`decode`: so many sequences decode, one token each. `mix`: in every step requests end and others arrive, so that
prefill, admission and registration are part of each step. Measured on a 2-core AVX-512 machine: 256 sequences with
contexts of 256 cost 0.74 ms, and 1.98 before messages were made by `core.maker` and tables kept between steps.
"""

import argparse
import cProfile
import pstats
from collections.abc import Callable
from time import process_time

import torch
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import Capacity, Draw, Request, Sampled, SchedulingPolicy, StepPlan, StepResult
from bakehouse_replica.model.batch import build_batch, flatten

BLOCK_SIZE = 16
N_STEP_TOKENS = 64 * 1024  # prefill is over in a few steps
N_MEASURED_STEPS = 200
CPU = torch.device("cpu")
CASES = tuple((n_sequences, n_prompt) for n_sequences in (1, 32, 256) for n_prompt in (16, 256, 1024))
MIX_PROMPT, MIX_OUTPUT = 128, 64  # of 256 sequences, four end and four arrive in each step


def _result(plan: StepPlan) -> StepResult:
    sampled = tuple(
        Sampled(sequence_id=chunk.sequence_id, draws=(Draw(token_ids=(plan.step % 1000,)),))
        for chunk in plan.chunks
        if chunk.sample
    )
    return StepResult(step=plan.step, sampled=sampled, elapsed_s=0.0)


def _request(index: int, n_prompt: int, max_tokens: int | None) -> Request:
    params = SamplingParams(temperature=1.0, seed=index, max_tokens=max_tokens)
    return Request(request_id=str(index), prompt_ids=(index, *range(1, n_prompt)), params=params)


def _scheduler(n_sequences: int, n_prompt: int, n_step_tokens: int = N_STEP_TOKENS) -> Scheduler:
    max_model_len = n_prompt + 2 * N_MEASURED_STEPS + BLOCK_SIZE + n_sequences
    capacity = Capacity(
        n_blocks=n_sequences * (max_model_len // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_step_tokens=n_step_tokens,
        max_sequences=n_sequences,
    )
    policy = SchedulingPolicy(max_model_len=max_model_len, max_prefill_tokens=n_step_tokens)
    return Scheduler(capacity=capacity, policy=policy, model_digest="benchmark", hash_key=b"")


def _run(scheduler: Scheduler, n_steps: int, refill: Callable[[], None]) -> tuple[list[float], list[float]]:
    """CPU seconds of each step: scheduling, and building the batch."""
    scheduling_s: list[float] = []
    building_s: list[float] = []
    for _ in range(n_steps):
        refill()
        begun_at = process_time()
        plan = scheduler.plan(0.0)
        planned_after_s = process_time() - begun_at
        assert plan is not None
        begun_at = process_time()
        build_batch(flatten(plan.chunks), block_size=BLOCK_SIZE, device=CPU)
        building_s.append(process_time() - begun_at)
        result = _result(plan)
        begun_at = process_time()
        scheduler.apply(result, 0.0)
        scheduling_s.append(planned_after_s + process_time() - begun_at)
    return scheduling_s, building_s


def _decoding(n_sequences: int, n_prompt: int) -> tuple[list[float], list[float]]:
    scheduler = _scheduler(n_sequences, n_prompt)
    for index in range(n_sequences):
        scheduler.add(_request(index, n_prompt, None), 0.0)
    while scheduler.load().waiting_tokens:
        _run(scheduler, 1, lambda: None)
    return _run(scheduler, N_MEASURED_STEPS, lambda: None)


def _mixed(n_sequences: int) -> tuple[list[float], list[float]]:
    """Arrivals spread so evenly that the number of running sequences stays near `n_sequences`."""
    scheduler = _scheduler(n_sequences, MIX_PROMPT, n_step_tokens=2048)
    n_arrived = 0

    def refill() -> None:
        nonlocal n_arrived
        for _ in range(max(1, n_sequences // MIX_OUTPUT)):
            scheduler.add(_request(n_arrived, MIX_PROMPT, MIX_OUTPUT), 0.0)
            n_arrived += 1

    _run(scheduler, 2 * MIX_OUTPUT, refill)
    return _run(scheduler, N_MEASURED_STEPS, refill)


def _report(name: str, costs: tuple[list[float], list[float]]) -> None:
    scheduling_s, building_s = map(sorted, costs)
    middle, late = N_MEASURED_STEPS // 2, N_MEASURED_STEPS * 99 // 100
    print(
        f"{name:38} median {1e3 * scheduling_s[middle]:6.3f} ms a step, p99 {1e3 * scheduling_s[late]:6.3f}; "
        f"batch {1e3 * building_s[middle]:6.3f}"
    )


def main() -> None:
    """Prints one line for each case; `--profile`: where a decode step of 256 spends its time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    if parser.parse_args().profile:
        profile = cProfile.Profile()
        profile.runcall(_decoding, 256, 256)
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)
        return
    for n_sequences, n_prompt in CASES:
        _report(f"decode, {n_sequences:3} of {n_prompt:4} and more", _decoding(n_sequences, n_prompt))
    _report(f"mix, 256 of {MIX_PROMPT} in / {MIX_OUTPUT} out", _mixed(256))


if __name__ == "__main__":
    main()
