"""What a step's kernels read, sent to the device by one copy from memory that is pinned once.

All of it is an array of 64-bit words, at whose beginning, on the device alone, stand the ids that the last step
drew. A token that is not known to the host is one of those: so all tokens of a step come by one gather from the
same array, and a recording finds everything where it was when it was made.

Two steps may be on their way: each has memory of its own on the host, which is filled again only when the copy
from it has ended.

Shape legend in `bakehouse_kernels.layout`; R counts the rows after which tokens are drawn, Q those that score, C
the copies of blocks.
"""

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import torch
from bakehouse_kernels.layout import DrawTensors
from numpy.typing import NDArray
from torch import Tensor

_WORD_BYTES = 8
_N_HOST_COPIES = 2

A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays(Generic[A]):
    """A step's inputs, as arrays on the host or as tensors on the device; all int64 but for what a draw asks.

    `gather_T`: where each token stands among the words. The others: see `BatchTensors` and `DrawTensors`.
    """

    token_ids_T: A
    gather_T: A
    positions_T: A
    slots_T: A
    sample_at_R: A
    score_at_Q: A
    source_C: A
    target_C: A
    key_R: A
    top_p_R: A
    min_p_R: A
    temperature_R: A
    top_k_R: A


_NAMES = tuple(field.name for field in fields(StepArrays))
_DTYPES: dict[str, tuple[type[np.generic], torch.dtype]] = {
    "top_p_R": (np.float64, torch.float64),
    "min_p_R": (np.float64, torch.float64),
    "temperature_R": (np.float32, torch.float32),
    "top_k_R": (np.int32, torch.int32),
}
_WORD = (np.int64, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long a step's inputs are."""

    n_tokens: int
    n_draws: int
    n_scored: int = 0
    n_copies: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each of `StepArrays`' fields, in their order."""
        by_axis = {"T": self.n_tokens, "R": self.n_draws, "Q": self.n_scored, "C": self.n_copies}
        return tuple(by_axis[name[-1]] for name in _NAMES)

    @property
    def n_words(self) -> int:
        """Words that all of them take, each beginning with one."""
        return sum(map(_n_words, _NAMES, self.lengths))


@dataclass(slots=True)
class _HostCopy:
    words: Tensor
    sent: torch.cuda.Event | None = None


class Staging:
    """The words of one runner, on its device and on the host."""

    def __init__(self, largest: Sizes, *, max_draws: int, device: torch.device) -> None:
        """Room for a step of the `largest` sizes, after one that drew `max_draws` tokens."""
        self._device = device
        self._n_drawn = max_draws
        self._words = torch.zeros(max_draws + largest.n_words, dtype=torch.int64, device=device)
        self._host = [
            _HostCopy(torch.zeros(largest.n_words, dtype=torch.int64, pin_memory=device.type == "cuda"))
            for _ in range(_N_HOST_COPIES)
        ]
        self._next = 0

    @property
    def drawn_R(self) -> Tensor:
        """The ids that the last step drew, which the next one may read."""
        return self._words[: self._n_drawn]

    def tokens(self, inputs: StepArrays[Tensor]) -> Tensor:
        """The step's token ids, those that the last step drew among them, `[T]`.

        Where that step could draw none, 0: whoever takes its result learns of it.
        """
        return self._words.index_select(0, inputs.gather_T).clamp_(min=0)

    def gather(self, source_T: NDArray[np.int64]) -> NDArray[np.int64]:
        """`StepArrays.gather_T`: token t is the last step's draw `source[t]`, or the host's own where that is -1.

        The host's tokens stand first among what is sent.
        """
        return np.where(source_T < 0, self._n_drawn + np.arange(len(source_T)), source_T)

    def send(self, arrays: StepArrays[np.ndarray], sizes: Sizes) -> StepArrays[Tensor]:
        """Copies a step's inputs to the device without waiting; where they stand depends on `sizes` alone."""
        host = self._host[self._next]
        self._next = (self._next + 1) % _N_HOST_COPIES
        if host.sent is not None:
            host.sent.synchronize()
        numbers, begin = host.words.numpy(), 0
        for name, length in zip(_NAMES, sizes.lengths, strict=True):
            end = begin + _n_words(name, length)
            numbers[begin:end].view(_DTYPES.get(name, _WORD)[0])[:length] = getattr(arrays, name)
            begin = end
        self._words[self._n_drawn : self._n_drawn + begin].copy_(host.words[:begin], non_blocking=True)
        if self._device.type == "cuda":
            if host.sent is None:
                host.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            host.sent.record()
        return self.inputs(sizes)

    def inputs(self, sizes: Sizes) -> StepArrays[Tensor]:
        """Where the inputs of a step of these sizes stand on the device."""
        tensors, begin = {}, self._n_drawn
        for name, length in zip(_NAMES, sizes.lengths, strict=True):
            end = begin + _n_words(name, length)
            tensors[name] = self._words[begin:end].view(_DTYPES.get(name, _WORD)[1])[:length]
            begin = end
        return StepArrays(**tensors)


def asks_of(inputs: StepArrays[Tensor]) -> DrawTensors:
    """How the step's tokens are drawn."""
    return DrawTensors(
        temperature_R=inputs.temperature_R,
        top_k_R=inputs.top_k_R,
        top_p_R=inputs.top_p_R,
        min_p_R=inputs.min_p_R,
        key_R=inputs.key_R,
    )


def _n_words(name: str, length: int) -> int:
    n_bytes = length * np.dtype(_DTYPES.get(name, _WORD)[0]).itemsize
    return -(-n_bytes // _WORD_BYTES)
