"""Staging: what is sent stands on the device, where a step of the same sizes finds it again."""

import numpy as np
import torch
from bakehouse_replica.model.staging import Sizes, Staging, StepArrays

CPU = torch.device("cpu")
SIZES = Sizes(n_tokens=5, n_draws=3, n_scored=2, n_copies=1)


def arrays_of(sizes: Sizes, seed: int) -> StepArrays[np.ndarray]:
    random = np.random.default_rng(seed)
    names = tuple(StepArrays.__dataclass_fields__)
    arrays = {name: random.integers(0, 100, n) for name, n in zip(names, sizes.lengths, strict=True)}
    return StepArrays(**arrays)


def test_every_array_arrives_in_its_type() -> None:
    staging = Staging(SIZES, max_draws=4, device=CPU)
    for seed in range(3):  # more often than there are copies on the host
        arrays = arrays_of(SIZES, seed)
        inputs = staging.send(arrays, SIZES)
        for name in StepArrays.__dataclass_fields__:
            assert getattr(inputs, name).tolist() == getattr(arrays, name).tolist()
    assert inputs.top_p_R.dtype == inputs.min_p_R.dtype == torch.float64
    assert inputs.temperature_R.dtype == torch.float32
    assert inputs.top_k_R.dtype == torch.int32


def test_inputs_of_the_same_sizes_stand_in_the_same_place() -> None:
    staging = Staging(SIZES, max_draws=4, device=CPU)
    before = staging.inputs(SIZES)
    arrays = arrays_of(SIZES, 7)
    staging.send(arrays, SIZES)
    assert before.slots_T.tolist() == arrays.slots_T.tolist()
    assert before.temperature_R.tolist() == arrays.temperature_R.tolist()


def test_tokens_that_the_last_step_drew_stand_among_those_of_the_host() -> None:
    staging = Staging(SIZES, max_draws=4, device=CPU)
    staging.drawn_R.copy_(torch.tensor([40, 41, -1, 43]))
    zeros: dict[str, np.ndarray] = {
        name: np.zeros(n) for name, n in zip(StepArrays.__dataclass_fields__, SIZES.lengths, strict=True)
    }
    zeros["token_ids_T"] = np.array([10, 0, 12, 0, 0])
    zeros["gather_T"] = staging.gather(np.array([-1, 3, -1, 0, 2]))
    inputs = staging.send(StepArrays(**zeros), SIZES)
    assert staging.tokens(inputs).tolist() == [10, 43, 12, 40, 0]
