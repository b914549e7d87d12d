"""Ranks of a tensor-parallel executor as threads of the test's own process, over real sockets and gloo."""

import threading
from collections.abc import Callable
from dataclasses import fields

import torch
from bakehouse_replica.executors.links import Invitation
from bakehouse_replica.executors.tensor_parallel import LOOPBACK, Leader
from bakehouse_replica.executors.worker import Follower, run_rank
from bakehouse_replica.model.collective import Collective
from bakehouse_replica.model.sharding import Shard, cut
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, LayerWeights
from torch import Tensor

CPU = torch.device("cpu")
JOIN_TIMEOUT_S = 30.0

LoadRank = Callable[[Collective], Follower]


class ThreadRanks:
    """Ranks 1, 2, …, each in a thread."""

    def __init__(self, invitation: Invitation, load: LoadRank) -> None:
        self._threads = [
            threading.Thread(
                target=run_rank, args=(invitation, rank, load, lambda: CPU, lambda: None), daemon=True
            )
            for rank in range(1, invitation.size)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """They always come."""

    def end(self) -> None:
        """They do by themselves."""
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive(), "a rank has not ended with rank 0"


def leader_of(size: int, load: LoadRank, timeout_s: float = 60.0) -> Leader:
    """Rank 0's side; `load` makes the others' parts."""
    return Leader(
        host=LOOPBACK,
        size=size,
        timeout_s=timeout_s,
        device=CPU,
        start=lambda invitation: ThreadRanks(invitation, load),
    )


def part_of(weights: DecoderWeights, spec: ModelSpec, shard: Shard) -> DecoderWeights:
    """One rank's part of weights that are in memory and have no bias."""

    def part(name: str, weight: Tensor) -> Tensor:
        own = cut(name, weight, spec, shard)
        assert own is not None, "no bias in such weights"
        return own

    def layer_part(layer: LayerWeights) -> LayerWeights:
        whole = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return LayerWeights(**{name: part(name, weight) for name, weight in whole.items() if weight is not None})

    return DecoderWeights(
        embedding_VE=part("embedding_VE", weights.embedding_VE),
        layers=tuple(map(layer_part, weights.layers)),
        final_norm_E=part("final_norm_E", weights.final_norm_E),
        head_VE=part("head_VE", weights.head_VE),
    )
