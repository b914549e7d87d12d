"""What the scheduler costs per step: CPU milliseconds of `plan` + `apply` while 256 sequences decode.

PYTHONPATH=replica python replica/benchmarks/scheduler_step.py
"""

from time import process_time

from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.scheduler import Scheduler
from bakehouse_replica.core.types import Capacity, Draw, Request, Sampled, SchedulingPolicy, StepPlan, StepResult

N_SEQUENCES = 256
BLOCK_SIZE = 16
N_STEP_TOKENS = 64 * 1024  # prefill is over in a few steps
N_MEASURED_STEPS = 200
PROMPT_LENGTHS = (16, 256, 1024)


def _result(plan: StepPlan) -> StepResult:
    sampled = tuple(
        Sampled(sequence_id=chunk.sequence_id, draws=(Draw(token_ids=(plan.step % 1000,)),))
        for chunk in plan.chunks
        if chunk.sample
    )
    return StepResult(step=plan.step, sampled=sampled, elapsed_s=0.0)


def _decoding_scheduler(n_prompt: int) -> Scheduler:
    max_model_len = n_prompt + N_MEASURED_STEPS + BLOCK_SIZE + N_SEQUENCES
    n_blocks = N_SEQUENCES * (max_model_len // BLOCK_SIZE + 1)
    scheduler = Scheduler(
        capacity=Capacity(
            n_blocks=n_blocks, block_size=BLOCK_SIZE, max_step_tokens=N_STEP_TOKENS, max_sequences=N_SEQUENCES
        ),
        policy=SchedulingPolicy(max_model_len=max_model_len, max_prefill_tokens=N_STEP_TOKENS),
        model_digest="benchmark",
        hash_key=b"",
    )
    for index in range(N_SEQUENCES):
        prompt_ids = (index, *range(1, n_prompt))
        params = SamplingParams(temperature=1.0, seed=index)
        scheduler.add(Request(request_id=str(index), prompt_ids=prompt_ids, params=params), 0.0)
    while scheduler.load().waiting_tokens:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.apply(_result(plan), 0.0)
    return scheduler


def main() -> None:
    """Prints one line for each prompt length."""
    for n_prompt in PROMPT_LENGTHS:
        scheduler = _decoding_scheduler(n_prompt)
        elapsed_s: list[float] = []
        for _ in range(N_MEASURED_STEPS):
            begun_at = process_time()
            plan = scheduler.plan(0.0)
            planned_after_s = process_time() - begun_at
            assert plan is not None
            assert len(plan.chunks) == N_SEQUENCES
            result = _result(plan)
            begun_at = process_time()
            deltas = scheduler.apply(result, 0.0)
            elapsed_s.append(planned_after_s + process_time() - begun_at)
            assert len(deltas) == N_SEQUENCES
        elapsed_s.sort()
        median_ms, worst_ms = 1e3 * elapsed_s[len(elapsed_s) // 2], 1e3 * elapsed_s[-1]
        print(f"{N_SEQUENCES} sequences, prompts of {n_prompt:5}: {median_ms:.2f} ms a step, worst {worst_ms:.2f}")


if __name__ == "__main__":
    main()
