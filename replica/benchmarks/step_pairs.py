"""What a step costs in one source tree against another, in pairs, so that other load disturbs both alike.

.venv/bin/python replica/benchmarks/step_pairs.py OLD_TREE NEW_TREE [--pairs N] [--only NAME]

Each tree has a process of its own, which runs this file with that tree's packages. A round is some steps of one
case; the two processes take turns, and who begins alternates. Printed are the CPU milliseconds a step of both
(medians of rounds), the median of the ratios of the pairs, and their quartiles. The same tree twice says what such
a median is worth.

Of the scheduler (`add`, `plan`, `apply`; 256 sequences, prompts of 64), with and without overlap:

    decode    all decode, and in each step 16 of them take another block       a round is 16 steps
    aligned   the same, but all take it in the same step                       16 steps: one of them does
    queue     as `decode`, and 256 more wait for a slot                        16 steps
    mix       four requests end and four arrive in each step                   16 steps
    lives     256 requests come at once and end at once, 200 tokens each       all steps, from the first `add` on

Of the engine (`engine_step.py`, one subscription), mean of all steps, arrivals and ends included:

    engine    its thread: plan, apply, publish                                 all steps
    loop      its event loop: messages packed and pickled                      all steps
"""

import argparse
import asyncio
import gc
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path
from statistics import median, quantiles
from time import thread_time

N_SEQUENCES = 256
N_PROMPT = 64
BLOCK_SIZE = 16
N_ROUND_STEPS = BLOCK_SIZE
STEP_S = 0.01  # what the driver's clock advances by, so that there is time to account for
N_LIFE_TOKENS = 200
N_MIX_TOKENS, N_MIX_ARRIVALS = 64, 4  # so that 256 run
MAX_MODEL_LEN = 8192
Round = Callable[[], float]  # CPU seconds a step


class Driven:
    """A scheduler with the loop of an engine around it, whose executor costs nothing."""

    def __init__(self, max_flights: int) -> None:
        from bakehouse_replica.core.scheduler import Scheduler  # of the tree that this process measures
        from bakehouse_replica.core.types import Capacity, SchedulingPolicy, StepPlan

        capacity = Capacity(
            n_blocks=N_SEQUENCES * MAX_MODEL_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_step_tokens=N_SEQUENCES * N_PROMPT * 2,
            max_sequences=N_SEQUENCES,
            max_flights=max_flights,
        )
        policy = SchedulingPolicy(max_model_len=MAX_MODEL_LEN, max_prefill_tokens=capacity.max_step_tokens)
        self.scheduler = Scheduler(capacity=capacity, policy=policy, model_digest="benchmark", hash_key=b"")
        self._max_flights = max_flights
        self._begun: deque[StepPlan] = deque()
        self._now = 0.0
        self._ids = count()
        self.spent_s = 0.0

    def add(self, n_prompt: int, max_tokens: int | None) -> None:
        """Another request, with a prompt of its own."""
        from bakehouse_replica.core.sampling import SamplingParams
        from bakehouse_replica.core.types import Request

        index = next(self._ids)
        params = SamplingParams(temperature=1.0, seed=index, max_tokens=max_tokens)
        request = Request(request_id=f"r{index}", prompt_ids=(index, *range(1, n_prompt)), params=params)
        begun_s = thread_time()
        self.scheduler.add(request, self._now)
        self.spent_s += thread_time() - begun_s

    def step(self) -> None:
        """One turn of the engine's loop."""
        from bakehouse_replica.core.types import Draw, Sampled, StepResult

        self._now += STEP_S
        begun_s = thread_time()
        plan = self.scheduler.plan(self._now)
        self.spent_s += thread_time() - begun_s
        if plan is not None:
            self._begun.append(plan)
        if plan is not None and len(self._begun) < self._max_flights:
            return
        oldest = self._begun.popleft()
        draws = (Draw(token_ids=(oldest.step % 1000,)),)
        sampled = tuple(
            Sampled(sequence_id=chunk.sequence_id, draws=draws) for chunk in oldest.chunks if chunk.sample
        )
        result = StepResult(step=oldest.step, sampled=sampled, elapsed_s=0.0)
        begun_s = thread_time()
        self.scheduler.apply(result, self._now)
        self.spent_s += thread_time() - begun_s


def _steps_of(driven: Driven, refill: Callable[[], None] = lambda: None, n_warm_up: int = 3) -> Round:
    def one_round() -> float:
        driven.spent_s = 0.0
        for _ in range(N_ROUND_STEPS):
            refill()
            driven.step()
        return driven.spent_s / N_ROUND_STEPS

    for _ in range(n_warm_up):
        one_round()
    return one_round


def _decoding(max_flights: int, *, is_aligned: bool = False, n_waiting: int = 0) -> Round:
    driven = Driven(max_flights)
    for index in range(N_SEQUENCES + n_waiting):
        driven.add(N_PROMPT + (0 if is_aligned else index % BLOCK_SIZE), None)
    return _steps_of(driven)


def _mix(max_flights: int) -> Round:
    driven = Driven(max_flights)

    def refill() -> None:
        for _ in range(N_MIX_ARRIVALS):
            driven.add(N_PROMPT, N_MIX_TOKENS)

    return _steps_of(driven, refill, n_warm_up=2 * N_MIX_TOKENS // N_ROUND_STEPS)


def _lives(max_flights: int) -> Round:
    def one_round() -> float:
        driven = Driven(max_flights)
        for index in range(N_SEQUENCES):
            driven.add(N_PROMPT + index % BLOCK_SIZE, N_LIFE_TOKENS)
        n_steps = 0
        while driven.scheduler.has_work:
            driven.step()
            n_steps += 1
        return driven.spent_s / n_steps

    return one_round


def _engine(max_flights: int, *, of_loop: bool = False) -> Round:
    from engine_step import by_subscription, serve_all

    def one_round() -> float:
        meter, loop_s = asyncio.run(serve_all(by_subscription, max_flights=max_flights))
        parts = [meter.spent_s[part] for part in ("plan", "apply", "publish")]
        return sum(loop_s) / len(loop_s) if of_loop else sum(map(sum, parts)) / len(parts[0])

    return one_round


CASES: dict[str, Callable[[int], Round]] = {
    "decode": _decoding,
    "aligned": lambda max_flights: _decoding(max_flights, is_aligned=True),
    "queue": lambda max_flights: _decoding(max_flights, n_waiting=N_SEQUENCES),
    "mix": _mix,
    "lives": _lives,
    "engine": _engine,
    "loop": lambda max_flights: _engine(max_flights, of_loop=True),
}
LONG_ROUNDS = {"lives": 8, "engine": 16, "loop": 16}  # so many times fewer pairs


def serve_rounds(name: str, max_flights: int) -> None:
    """The child's side: a round for each line that comes, answered by its cost; ends with the input."""
    one_round = CASES[name](max_flights)
    one_round()
    print("ready", flush=True)
    for _ in sys.stdin:
        gc.collect()
        print(one_round(), flush=True)


class Child:
    """A process that measures one case in one tree."""

    def __init__(self, tree: Path, name: str, max_flights: int) -> None:
        packages = os.pathsep.join(str(tree / top) for top in ("replica", "kernels"))
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--round", name, str(max_flights)],
            env={**os.environ, "PYTHONPATH": packages},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def round_s(self) -> float:
        """What a step of one more round costs."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """Lets it end."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a measuring process ended with {self._process.wait()}; see its error above")
        return line


def pairs(old: Path, new: Path, name: str, max_flights: int, n_pairs: int) -> Iterator[tuple[float, float]]:
    """The costs of a step in both trees, round after round."""
    children = [Child(tree, name, max_flights) for tree in (old, new)]
    try:
        for index in range(n_pairs):
            order = (0, 1) if index % 2 else (1, 0)
            costs = {which: children[which].round_s() for which in order}
            yield costs[0], costs[1]
    finally:
        for child in children:
            child.close()


def main() -> None:
    """Prints one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*", metavar="TREE")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--round", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.round:
        serve_rounds(asked.round[0], int(asked.round[1]))
        return
    if len(asked.trees) != 2:
        parser.error(f"two trees are compared; {len(asked.trees)} given")
    old, new = asked.trees
    print(f"{N_SEQUENCES} sequences, CPU ms a step      old     new   new/old (quartiles)       pairs")
    for name, max_flights in product(asked.only or CASES, (1, 2)):
        costs = list(pairs(old, new, name, max_flights, max(asked.pairs // LONG_ROUNDS.get(name, 1), 2)))
        ratios = [new_s / old_s for old_s, new_s in costs]
        low, _, high = quantiles(ratios, n=4)
        old_ms, new_ms = (1e3 * median(side) for side in zip(*costs, strict=True))
        case = name if max_flights == 1 else f"{name}, overlap"
        middle = f"{median(ratios):9.3f} ({low:.3f} to {high:.3f})"
        print(f"{case:30} {old_ms:7.3f} {new_ms:7.3f} {middle} {len(ratios):8}", flush=True)


if __name__ == "__main__":
    main()
