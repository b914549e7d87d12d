"""No step takes more memory than was measured before the cache was sized, whatever its requests ask for."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Chunk, Sample, Score, StepPlan
from bakehouse_replica.executors.device_model import DeviceModel
from bakehouse_replica.executors.measuring import largest_steps, measure
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.device_sizing import N_NULL_BLOCKS
from bakehouse_replica.model.dummy_weights import dummy_tensors
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import assembled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CPU = torch.device("cpu")
N_BLOCKS, BLOCK_SIZE = 24, 8
N_VOCABULARY = 4000  # so that rows of logits weigh more than the layers
TOTAL_BYTES = 1 << 30


class TensorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The memory of all tensors that are made while it is on, as a device's allocator would see it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, int] = {}
        self._highest = 0

    def settle(self) -> None:
        pass

    def free_and_total(self) -> tuple[int, int]:
        return TOTAL_BYTES - self.allocated(), TOTAL_BYTES

    def allocated(self) -> int:
        return sum(self._alive.values())

    def restart_peak(self) -> None:
        self._highest = self.allocated()

    def peak(self) -> int:
        return self._highest

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key)
            self._highest = max(self._highest, self.allocated())


@pytest.fixture(scope="module")
def model() -> DeviceModel:
    spec = ModelSpec(
        n_layers=2,
        hidden_size=32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        feed_forward_size=48,
        vocabulary_size=N_VOCABULARY,
        context_length=64,
        norm_eps=1e-5,
        rope_frequencies=tuple(0.3**i for i in range(8)),
        has_tied_head=True,
    )
    ops = ReferenceOps()
    weights = assembled(dummy_tensors(spec, dtype=torch.float32, device=CPU), spec)
    return DeviceModel(
        spec=spec,
        decoder=Decoder(spec, weights, ops),
        ops=ops,
        device=CPU,
        block_size=BLOCK_SIZE,
        max_model_len=64,
        max_step_tokens=96,
        max_sequences=8,
    )


def peak_of(model: DeviceModel, plans: Sequence[StepPlan]) -> int:
    """The most that these steps take beside weights and cache, what their runner holds included."""
    meter = TensorMeter()
    with meter:
        cache_bytes = (N_BLOCKS + N_NULL_BLOCKS) * model.kv_shape(torch.float32).block_bytes
        runner = model.runner(N_BLOCKS)
        for plan in plans:
            runner.begin(plan).result()
        return meter.peak() - cache_bytes


ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=100.0, top_p=0.999, logprobs=20),
    SamplingParams(temperature=1.0, logprobs=5, presence_penalty=1.0, min_p=0.01),
    SamplingParams(temperature=50.0, top_k=N_VOCABULARY, allowed_token_ids=tuple(range(N_VOCABULARY))),
)


def random_step(model: DeviceModel, random: Random, number: int) -> StepPlan:
    """As many chunks, tokens, draws of one or several choices, and scores as limits and pool allow."""
    n_chunks = random.randint(1, model.max_sequences)
    lengths = [random.randint(2, model.max_step_tokens // n_chunks) for _ in range(n_chunks)]
    n_each = N_BLOCKS // n_chunks
    chunks = []
    for index, wanted in enumerate(lengths):
        length = min(wanted, n_each * BLOCK_SIZE, model.max_model_len)
        n_seeds = model.max_sequences - n_chunks + 1 if index == 0 and random.random() < 0.3 else 1
        sample = Sample(
            params=random.choice(ASKED),
            seeds=tuple(range(n_seeds)),
            output_index=0,
            prompt_ids=tuple(range(length)),
        )
        score = Score(first_row=0, target_ids=(1,) * (length - 1), n_top=20) if random.random() < 0.5 else None
        blocks = tuple(range(index * n_each, index * n_each + -(-length // BLOCK_SIZE)))
        chunks.append(
            Chunk(
                sequence_id=index,
                token_ids=(3,) * length,
                start=0,
                block_ids=blocks,
                sample=sample,
                score=score,
            )
        )
    return StepPlan(step=number, copies=(), chunks=tuple(chunks))


def test_no_step_takes_more_than_was_measured(model: DeviceModel) -> None:
    random = Random(4)
    with TensorMeter() as meter:
        memory = measure(model, model.kv_shape(torch.float32).block_bytes, meter)
    assert memory.total_bytes == TOTAL_BYTES
    peaks = [peak_of(model, [random_step(model, random, number)]) for number in range(40)]
    print(f"measured {memory.step_bytes:,} bytes; steps take up to {max(peaks):,}")
    assert max(peaks) <= memory.step_bytes


def test_what_the_host_draws_and_what_is_scored_count(model: DeviceModel) -> None:
    by_device, by_host = largest_steps(model, N_BLOCKS)
    unscored = replace(by_host, chunks=tuple(replace(chunk, score=None) for chunk in by_host.chunks))
    plain = tuple(
        replace(chunk, sample=Sample(params=ASKED[0], seeds=(0,), output_index=0)) for chunk in by_device.chunks
    )
    least, most = peak_of(model, [replace(by_device, chunks=plain)]), peak_of(model, [by_host])
    print(f"greedy {least:,}, by host {peak_of(model, [unscored]):,}, and scored {most:,} bytes")
    assert peak_of(model, [unscored]) > least + 2 * 4 * model.max_sequences * N_VOCABULARY
    assert most >= peak_of(model, [unscored])
    with TensorMeter() as meter:
        memory = measure(model, model.kv_shape(torch.float32).block_bytes, meter)
    assert memory.step_bytes >= most
