"""Where steps do not overlap, plans are those that were made before they could: block ids and all."""

from hashlib import blake2b
from random import Random

from bakehouse_replica.core.types import Capacity, SchedulingPolicy, StepPlan
from driving import Driver, make_request

# Of the scheduler that knew of one step in flight only. Who means to plan otherwise renews it, and says so.
DIGEST = "59844789c51ad049b8d2c1ae3f5b99a0"
N_WORKLOADS = 60


def written(plan: StepPlan) -> tuple[object, ...]:
    """All that the plan says, in numbers."""
    copies = tuple((copy.source, copy.target) for copy in plan.copies)
    chunks = tuple(
        (
            chunk.sequence_id,
            chunk.token_ids,
            chunk.start,
            chunk.block_ids,
            chunk.sample and (chunk.sample.seeds, chunk.sample.output_index, chunk.sample.output_ids),
            chunk.score and (chunk.score.first_row, chunk.score.target_ids),
        )
        for chunk in plan.chunks
    )
    return plan.step, copies, chunks


def play(random: Random) -> Driver:
    """A crowded workload on a small pool: shared prefixes, forks, priorities, penalties, scores, aborts."""
    capacity = Capacity(
        n_blocks=random.randint(8, 16), block_size=random.randint(2, 4), max_step_tokens=9, max_sequences=5
    )
    policy = SchedulingPolicy(
        max_model_len=40, max_prefill_tokens=random.randint(2, 8), long_prefill_tokens=random.randint(3, 9)
    )
    driver = Driver(capacity, policy)
    for index in range(10):
        driver.add(
            make_request(
                f"r{index}",
                (index % 2, *range(30, 30 + random.randint(0, 9)), index % 3),
                n=random.choice((1, 1, 2, 3)),
                max_tokens=random.randint(0, 7),
                temperature=1.0,
                seed=index,
                stop=(3, 11, 19) if index % 2 else (),
                priority=random.choice((0, 0, -1)),
                presence_penalty=random.choice((0.0, 0.5)),
                prompt_logprobs=random.choice((None, 1)),
            )
        )
        for _ in range(random.randint(0, 3)):
            driver.step(during=lambda: driver.abort(f"r{random.randint(0, 60)}"))
    driver.run()
    return driver


def test_plans_are_what_they_were_before_steps_could_overlap() -> None:
    digest = blake2b(digest_size=16)
    n_preempted = 0
    for seed in range(N_WORKLOADS):
        reached: dict[int, int] = {}
        for plan in play(Random(seed)).plans:
            digest.update(repr(written(plan)).encode())
            for chunk in plan.chunks:
                n_preempted += chunk.start < reached.get(chunk.sequence_id, 0)
                reached[chunk.sequence_id] = chunk.start + len(chunk.token_ids)
    assert n_preempted > 20, "the workloads do not press"
    assert digest.hexdigest() == DIGEST
