"""Ids that a device has drawn, on their way back to the host."""

import torch
from torch import Tensor

_N_ROOMS = 2  # steps on their way at the same time


class Returned:
    """The ids of one step."""

    def __init__(self, ids_R: Tensor, arrived: torch.cuda.Event | None) -> None:
        self._ids_R = ids_R
        self._arrived = arrived

    def ids(self) -> list[int]:
        """Waits for them; they stand there until the step after the next one is begun."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids: list[int] = self._ids_R.tolist()
        return ids


class Returning:
    """Pinned memory for the ids of two steps, taken in turn."""

    def __init__(self, max_draws: int, device: torch.device) -> None:
        self._is_asynchronous = device.type == "cuda"
        self._rooms = [
            torch.zeros(max_draws, dtype=torch.int64, pin_memory=self._is_asynchronous) for _ in range(_N_ROOMS)
        ]
        self._next = 0

    def fetch(self, drawn_R: Tensor) -> Returned:
        """Starts the way back, after all that has been launched."""
        room_R = self._rooms[self._next][: len(drawn_R)]
        self._next = (self._next + 1) % _N_ROOMS
        room_R.copy_(drawn_R, non_blocking=True)
        if not self._is_asynchronous:
            return Returned(room_R, None)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Returned(room_R, arrived)
