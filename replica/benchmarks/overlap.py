"""How much of the host's time overlapped scheduling hides: an engine beside a device that takes so long a step.

The device is a clock: a step is done its time after it was begun, or after the one before was done, whichever is
later, and the thread that takes its result sleeps until then. So the engine's own work is all that can keep it
idle: planning, beginning, applying, publishing to a stream each. Prints tokens a second with overlap and without,
beside what a device that never waits would give, and the share of time in which it waited.

PYTHONPATH=replica python replica/benchmarks/overlap.py
"""

import asyncio
from dataclasses import dataclass, replace
from time import perf_counter, sleep

from bakehouse_replica.core.executor import Pending
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import (
    Capacity,
    Draw,
    ReplicaCard,
    Request,
    Sampled,
    SchedulingPolicy,
    StepPlan,
    StepResult,
)
from bakehouse_replica.engine import Engine

N_PROMPT = 16
N_OUTPUT = 400
BLOCK_SIZE = 16
MAX_MODEL_LEN = N_PROMPT + N_OUTPUT
CASES = tuple((n_sequences, step_ms) for n_sequences in (1, 64, 256) for step_ms in (2.0, 5.0))
VOCABULARY_SIZE = 1000


@dataclass(frozen=True, slots=True)
class ClockedStep:
    """A step that is done at a time of the clock."""

    step_result: StepResult
    done_at: float

    def result(self) -> StepResult:
        """Sleeps until it is done."""
        sleep(max(self.done_at - perf_counter(), 0.0))
        return self.step_result


class ClockExecutor:
    """Draws the step's number, `step_s` seconds a step; `idle_s` counts the time between its steps."""

    def __init__(self, capacity: Capacity, step_s: float) -> None:
        self._capacity = capacity
        self._step_s = step_s
        self._done_at = 0.0
        self.idle_s = 0.0
        self.n_steps = 0

    @property
    def capacity(self) -> Capacity:
        """What it was told to have."""
        return self._capacity

    def prepare(self, params: SamplingParams) -> None:
        """Nothing to make ready."""

    def begin(self, plan: StepPlan) -> Pending:
        """Starts the clock."""
        draw = Draw(token_ids=(plan.step % VOCABULARY_SIZE,))
        sampled = tuple(
            Sampled(sequence_id=chunk.sequence_id, draws=(draw,)) for chunk in plan.chunks if chunk.sample
        )
        begun_at = perf_counter()
        if self.n_steps:
            self.idle_s += max(begun_at - self._done_at, 0.0)
        self.n_steps += 1
        self._done_at = max(self._done_at, begun_at) + self._step_s
        return ClockedStep(StepResult(step=plan.step, sampled=sampled, elapsed_s=self._step_s), self._done_at)

    def close(self) -> None:
        """Nothing to release."""


async def serve(n_sequences: int, step_s: float, max_flights: int) -> tuple[float, float]:
    """Tokens a second, and the share of the time in which the device waited."""
    capacity = Capacity(
        n_blocks=n_sequences * (MAX_MODEL_LEN // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_step_tokens=n_sequences * N_PROMPT,
        max_sequences=n_sequences,
        max_flights=max_flights,
    )
    executor = ClockExecutor(capacity, step_s)
    card = replace(CARD, n_blocks=capacity.n_blocks, max_sequences=n_sequences)
    policy = SchedulingPolicy(max_model_len=MAX_MODEL_LEN, max_prefill_tokens=capacity.max_step_tokens)
    engine = Engine(executor=executor, policy=policy, card=card)
    engine.start()

    async def read(index: int) -> int:
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=N_OUTPUT)
        prompt = (index, *range(1, N_PROMPT))
        n_tokens = 0
        async for delivery in engine.generate(Request(request_id=str(index), prompt_ids=prompt, params=params)):
            n_tokens += sum(len(delta.token_ids) for delta in delivery.deltas)
        return n_tokens

    begun_at = perf_counter()
    n_tokens = sum(await asyncio.gather(*map(read, range(n_sequences))))
    elapsed_s = perf_counter() - begun_at
    await engine.close()
    return n_tokens / elapsed_s, executor.idle_s / (executor.idle_s + executor.n_steps * step_s)


CARD = ReplicaCard(
    replica_id="r",
    model_name="clock",
    model_digest="clock",
    hash_key=b"",
    block_size=BLOCK_SIZE,
    n_blocks=0,
    vocabulary_size=VOCABULARY_SIZE,
    max_model_len=MAX_MODEL_LEN,
    max_sequences=0,
)


def main() -> None:
    """Prints a line for each case."""
    print("sequences  step ms   tokens/s: at most      off       on    device waits: off     on")
    for n_sequences, step_ms in CASES:
        (off, idle_off), (on, idle_on) = (
            asyncio.run(serve(n_sequences, step_ms / 1000, max_flights)) for max_flights in (1, 2)
        )
        most = n_sequences * 1000 / step_ms
        print(
            f"{n_sequences:9} {step_ms:8.1f} {most:19.0f} {off:8.0f} {on:8.0f} {idle_off:19.1%} {idle_on:6.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
