"""Rows of logits together with what is found in passing over them.

Shape legend: R rows of logits, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import Survey
from torch import Tensor

# The smallest normal float32 keeps the best token's 0 / temperature at 0 in a row that is all but greedy.
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


class Surveyed(NamedTuple):
    """Logits in float32, the temperature of each row's weights (0 where it has none), and what was found."""

    logits_RV: Tensor
    temperature_R: Tensor
    found: Survey

    def weights(self, logits_NC: Tensor, row_N: Tensor) -> Tensor:
        """Of some logits of rows, each relative to the best of its row: float64, the best one's is 1."""
        return self.scaled(logits_NC, row_N).exp().double()

    def scaled(self, logits_NC: Tensor, row_N: Tensor) -> Tensor:
        """Some logits of rows over the temperature, the best of the row at 0."""
        return (logits_NC - self.found.value_RK[row_N, :1]).div_(self.temperature_R[row_N, None])


def survey(ops: Ops, logits_RV: Tensor, temperatures: Sequence[float], n_best: int) -> Surveyed:
    """What is found in each row at its temperature. Asserts that every row has a finite maximum, and no NaN."""
    logits_RV = logits_RV.float()
    temperature_R = torch.tensor(
        [max(temperature, _LEAST_TEMPERATURE) if temperature else 0.0 for temperature in temperatures],
        dtype=torch.float32,
        device=logits_RV.device,
    )
    found = ops.survey(logits_RV, temperature_R, n_best)
    assert bool(found.value_RK[:, 0].isfinite().all()), "a row of logits has no finite maximum"
    return Surveyed(logits_RV, temperature_R, found)
