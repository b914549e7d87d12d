"""Ranks on devices launch steps as they are begun; a lost one is named as on hosts."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.errors import RankLost, StartupError
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Sample, Score, StepPlan
from bakehouse_replica.executors.local_ranks import own_gpus
from bakehouse_replica.executors.on_device import DeviceExecutor
from bakehouse_replica.executors.tensor_parallel import TensorParallelExecutor, gather
from bakehouse_replica.executors.worker import Follower
from bakehouse_replica.model.batch import FlatChunks
from bakehouse_replica.model.collective import Alone, Collective
from bakehouse_replica.model.parallel_ops import ParallelOps
from executors import (
    CAPACITY,
    OTHER_BLOCKS,
    OTHER_PROMPT,
    PROMPT,
    SEEDED,
    chunk_of,
    device_part,
    make_on_device,
    make_tensor_parallel_on_device,
    run,
    sample_at,
)
from ranks import leader_of
from torch import Tensor

pytestmark = pytest.mark.usefixtures("nothing_hangs")
# See `test_tensor_parallel`.
TIMEOUT_S = 3.0
NAMED_WITHIN_S = 10 * TIMEOUT_S
OVERLAPPING = replace(CAPACITY, max_flights=2)
CHUNK = chunk_of(PROMPT, sample=sample_at(0))


def own_part(collective: Collective) -> DeviceExecutor:
    return device_part(collective, OVERLAPPING)


@dataclass
class Noted:
    """A follower that tells of each step, and in one does `misbehave` in its place."""

    inner: Follower
    at: int = 0
    misbehave: Callable[[], None] = lambda: None
    n_steps: int = 0
    has_followed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def follow(self, copies: tuple[BlockCopy, ...], flat: FlatChunks | None) -> None:
        self.n_steps += 1
        if self.n_steps == self.at:
            self.misbehave()
        else:
            self.inner.follow(copies, flat)
        self.has_followed.release()


@contextmanager
def shared(wrap: Callable[[Follower], Follower]) -> Iterator[TensorParallelExecutor]:
    executor = gather(leader_of(2, lambda collective: wrap(own_part(collective)), TIMEOUT_S), own_part)
    try:
        yield executor
    finally:
        executor.close()


def following(number: int) -> StepPlan:
    """The step that takes what the one before draws."""
    known = (*PROMPT, *(0,) * number)
    chunk = chunk_of(known, start=len(known) - 1, sample=sample_at(number))
    return StepPlan(step=number, copies=(), chunks=(replace(chunk, follows_draw=True),))


def test_an_order_goes_out_when_its_step_is_begun() -> None:
    notes: list[Noted] = []

    def wrap(follower: Follower) -> Follower:
        notes.append(Noted(follower))
        return notes[0]

    with shared(wrap) as executor:
        pending = [executor.begin(StepPlan(step=0, copies=(), chunks=(CHUNK,))), executor.begin(following(1))]
        for _ in pending:
            assert notes[0].has_followed.acquire(timeout=NAMED_WITHIN_S)
        assert [one.result().step for one in pending] == [0, 1]


@pytest.mark.parametrize("n_begun", [0, 1], ids=["the first in flight", "the second in flight"])
def test_a_rank_that_skips_a_step_is_named_within_the_time_limit(n_begun: int) -> None:
    with shared(lambda follower: Noted(follower, at=n_begun + 1)) as executor:
        pending = [executor.begin(StepPlan(step=0, copies=(), chunks=(CHUNK,)))] if n_begun else []
        begun_s = time.monotonic()
        with pytest.raises(RankLost, match=f"rank 1 has not taken part in step {n_begun + 1} for 3 s"):
            executor.begin(following(1) if n_begun else StepPlan(step=0, copies=(), chunks=(CHUNK,))).result()
        assert time.monotonic() - begun_s < NAMED_WITHIN_S
        assert len(pending) == n_begun


def test_a_rank_that_fails_is_named_with_its_error() -> None:
    def misbehave() -> None:
        raise MemoryError("no room for keys")

    lost = pytest.raises(RankLost, match="rank 1 has failed: MemoryError: no room for keys")
    with shared(lambda follower: Noted(follower, at=1, misbehave=misbehave)) as executor, lost:
        run(executor, CHUNK)


def test_an_error_of_the_device_is_explained_by_the_rank_that_is_lost() -> None:
    """Where operations have been aborted, anything may come of them; without a loss an error is rank 0's own."""
    with shared(lambda follower: follower) as executor:
        leader = executor._leader
        with pytest.raises(ZeroDivisionError), leader.explaining():
            raise ZeroDivisionError
        is_lost = threading.Event()
        executor.tell_of_loss(lambda _: is_lost.set())
        leader._links[0].reports.shutdown(socket.SHUT_RD)  # what a dead process's connection reads as
        assert is_lost.wait(NAMED_WITHIN_S)
        with pytest.raises(RankLost, match="rank 1 has died"), leader.explaining():
            raise ZeroDivisionError
        with pytest.raises(RankLost, match="rank 1 has died"), leader.explaining():
            pass


def plans() -> tuple[StepPlan, ...]:
    """Draws of device and host, several of one row, scores, copies with and without chunks, a step ahead."""
    on_host = SamplingParams(temperature=1.0, seed=0, logprobs=2, logit_bias=((7, 2.0),))
    scored = Score(first_row=0, target_ids=PROMPT[1:], n_top=2)
    forked = Sample(params=SEEDED, seeds=(4, 5, 6), output_index=0)
    other = chunk_of(OTHER_PROMPT, blocks=OTHER_BLOCKS, sequence_id=1, sample=sample_at(0, on_host))
    next_other = chunk_of(
        (*OTHER_PROMPT, 0), start=len(OTHER_PROMPT), blocks=OTHER_BLOCKS, sequence_id=1, sample=sample_at(1)
    )
    return (
        StepPlan(step=0, copies=(), chunks=(chunk_of(PROMPT, sample=forked, score=scored), other)),
        StepPlan(step=1, copies=(), chunks=(replace(next_other, follows_draw=True),)),
        StepPlan(step=2, copies=(BlockCopy(source=OTHER_BLOCKS[2], target=0),), chunks=()),
        StepPlan(
            step=3,
            copies=(BlockCopy(source=0, target=4),),
            chunks=(replace(next_other, block_ids=(*OTHER_BLOCKS[:2], 4), token_ids=(3,)),),
        ),
    )


def ids_and_logprobs(executor: Executor) -> list[object]:
    """Tokens, and of log-probabilities what rounding does not change."""
    found: list[object] = []
    for plan in plans():
        result = executor.begin(plan).result()
        for sampled in result.sampled:
            found += [(sampled.sequence_id, draw.token_ids) for draw in sampled.draws]
        for scored in result.scored:
            found += [(round(one.logprob, 3), [token_id for token_id, _ in one.top]) for one in scored.logprobs]
    executor.close()
    return found


def test_whatever_a_step_asks_two_ranks_answer_as_one() -> None:
    alone, two = (ids_and_logprobs(make(OVERLAPPING)) for make in (make_on_device, make_tensor_parallel_on_device))
    assert two == alone
    assert len(alone) == 3 + 1 + (len(PROMPT) - 1) + 2


class Recordable(Alone):
    """As NCCL's group: what it does can be recorded."""

    def __init__(self) -> None:
        self.n_plays = 0

    def count_play(self) -> None:
        self.n_plays += 1


def test_each_play_of_a_recording_counts_as_progress() -> None:
    collective = Recordable()
    seen: list[type[object]] = []

    def work(ops: Ops) -> Tensor:
        seen.append(type(ops))
        return torch.ones(1)

    recording = ParallelOps(ReferenceOps(), collective).record(work)
    n_before = collective.n_plays
    recording.play()
    recording.play()
    assert recording.result.equal(torch.ones(1))
    assert collective.n_plays - n_before == 2
    assert set(seen) == {ParallelOps}  # the sums are within


@pytest.mark.parametrize(("visible", "named"), [(None, ["0", "1"]), ("3,GPU-7", ["3", "GPU-7"])])
def test_each_process_sees_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, named: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in own_gpus(2)] == named
    with pytest.raises(StartupError, match="--tensor-parallel is 3, but this machine shows 2 GPUs"):
        own_gpus(3)
