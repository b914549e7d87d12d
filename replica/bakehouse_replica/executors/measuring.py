"""Finds out what the largest steps and the recordings take of a device's memory, by doing them.

A step may do three things that take memory beside its forward pass: draw on the device, with every row's changes
listed; draw by the host's sampler, which looks at whole rows where filters do not close; and score prompts. Steps
that do each of them to the utmost are rehearsed, so that no request can ask for more than was measured.
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import torch

from bakehouse_replica.core.capacity import blocks_for
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import BlockCopy, Chunk, Sample, Score, StepPlan
from bakehouse_replica.executors.device_model import DeviceModel
from bakehouse_replica.model.device_runner import DeviceRunner
from bakehouse_replica.model.device_sizing import N_NULL_BLOCKS, DeviceMemory, graph_bytes_of

logger = logging.getLogger(__name__)

_N_TOP = 20  # best tokens beside each log-probability: the gateway's usual limit


class Meter(Protocol):
    """A device's memory, in bytes."""

    def settle(self) -> None:
        """Give memory that nobody uses back to the device."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """What nobody on the device has taken, and what it has."""
        ...

    def allocated(self) -> int:
        """What tensors of this process take."""
        ...

    def restart_peak(self) -> None:
        """Forget what was the most so far."""
        ...

    def peak(self) -> int:
        """The most that tensors of this process have taken since."""
        ...


class CudaMeter:
    """That of a GPU, as its driver and torch's allocator see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """See `Meter`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def free_and_total(self) -> tuple[int, int]:
        """See `Meter`."""
        return torch.cuda.mem_get_info(self._device)

    def allocated(self) -> int:
        """See `Meter`."""
        return torch.cuda.memory_allocated(self._device)

    def restart_peak(self) -> None:
        """See `Meter`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See `Meter`."""
        return torch.cuda.max_memory_allocated(self._device)


def measure(model: DeviceModel, block_bytes: int, meter: Meter) -> DeviceMemory:
    """What the largest steps and the recordings take on a device, found by doing them with the least cache.

    What a runner holds between steps, inputs and the logits of recordings, counts as its steps'.
    """
    meter.settle()
    free_bytes, total_bytes = meter.free_and_total()
    n_blocks = blocks_for(model.max_step_tokens, model.block_size) + model.max_sequences
    resting_bytes = meter.allocated() + (n_blocks + N_NULL_BLOCKS) * block_bytes
    runner = model.runner(n_blocks)
    plans = largest_steps(model, n_blocks)
    for plan in plans:  # once, so that what is loaded and compiled does not count
        runner.rehearse(plan)
    meter.restart_peak()
    for plan in plans:
        runner.rehearse(plan)
    step_bytes = meter.peak() - resting_bytes
    begun_at = perf_counter()
    taken = [_taken_by(runner, bucket, meter) for bucket in model.buckets.falling()[:2]]
    n_graphs = len(model.buckets.falling())
    logger.info(
        "the largest step takes %.0f MB, a decode graph %.0f MB and %.2f s; %d graphs will be recorded",
        step_bytes / 1e6,
        taken[-1] / 1e6,
        (perf_counter() - begun_at) / len(taken),
        n_graphs,
    )
    runner.graphs.forget()
    del runner
    meter.settle()
    return DeviceMemory(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        step_bytes=step_bytes,
        graph_bytes=graph_bytes_of(n_graphs, first_bytes=taken[0], second_bytes=taken[-1]),
    )


def largest_steps(model: DeviceModel, n_blocks: int) -> tuple[StepPlan, ...]:
    """As many sequences and tokens as a step may have and `n_blocks` hold: drawn on the device, then by the host.

    On the device all tokens that a context can hold are penalised in each row. The host's rows ask for
    log-probabilities, and their weights are so even that the filter closes at the end of the vocabulary; besides,
    prompts as long as can be are scored.
    """
    n_seen = min(model.max_model_len, model.spec.vocabulary_size)
    by_device = SamplingParams(
        temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
    )
    by_host = SamplingParams(temperature=100.0, top_p=0.9999, logprobs=_N_TOP, logit_bias=((0, 1.0),))
    return (
        _largest(model, n_blocks, by_device, seen=tuple(range(n_seen))),
        _largest(model, n_blocks, by_host, are_scored=True),
    )


def one_decode(model: DeviceModel) -> StepPlan:
    """One token after another, drawn greedily."""
    sample = Sample(params=SamplingParams(temperature=0.0), seeds=(0,), output_index=1)
    n_blocks = blocks_for(2, model.block_size)
    chunk = Chunk(sequence_id=0, token_ids=(0,), start=1, block_ids=tuple(range(n_blocks)), sample=sample)
    return StepPlan(step=0, copies=(), chunks=(chunk,))


def unrecorded(model: DeviceModel, null_block: int) -> StepPlan:
    """A decode step with what no recording holds: a copy of a block, and logits that the host surveys."""
    plan = one_decode(model)
    (chunk,) = plan.chunks
    assert chunk.sample is not None
    sample = replace(chunk.sample, params=replace(chunk.sample.params, logprobs=1))
    copies = (BlockCopy(source=0, target=null_block),)
    return replace(plan, copies=copies, chunks=(replace(chunk, sample=sample),))


def _largest(
    model: DeviceModel,
    n_blocks: int,
    params: SamplingParams,
    *,
    seen: Sequence[int] = (),
    are_scored: bool = False,
) -> StepPlan:
    chunks: list[Chunk] = []
    n_tokens, next_block = model.max_step_tokens, 0
    n_sequences = min(model.max_sequences, n_tokens, n_blocks)
    for index in range(n_sequences):
        n_after = n_sequences - index - 1
        # Prompts are scored in slices, of which long ones fill more: then the first have all but one token of each
        # of the others. Else what is left is shared out.
        share = n_tokens - n_after if are_scored else -(-n_tokens // (n_after + 1))
        length = min(share, model.max_model_len)
        length = min(length, (n_blocks - next_block - n_after) * model.block_size)
        after_block = next_block + blocks_for(length, model.block_size)
        sample = Sample(params=params, seeds=(index,), output_index=0, prompt_ids=tuple(seen))
        score = Score(first_row=0, target_ids=(0,) * (length - 1), n_top=_N_TOP)
        chunks.append(
            Chunk(
                sequence_id=index,
                token_ids=(0,) * length,
                start=0,
                block_ids=tuple(range(next_block, after_block)),
                sample=sample,
                score=score if are_scored and length > 1 else None,
            )
        )
        n_tokens, next_block = n_tokens - length, after_block
    return StepPlan(step=0, copies=(), chunks=tuple(chunks))


def _taken_by(runner: DeviceRunner, bucket: tuple[int, int], meter: Meter) -> int:
    """Memory of the device that recording a bucket takes, what the driver keeps for graphs included."""
    meter.settle()  # a capture gives back what nobody uses, which would count against what it takes
    before_bytes, _ = meter.free_and_total()
    runner.graphs.record((bucket,))
    meter.settle()
    after_bytes, _ = meter.free_and_total()
    return max(0, before_bytes - after_bytes)
