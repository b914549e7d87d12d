"""A model, or one rank's part of it, on its device, with all that its runner is made of but the cache."""

from dataclasses import dataclass

import torch
from bakehouse_kernels.api import Ops

from bakehouse_replica.core.capacity import KVShape, blocks_for
from bakehouse_replica.executors.step_sizes import StepSizes
from bakehouse_replica.model.buckets import Buckets, buckets_of
from bakehouse_replica.model.collective import Collective
from bakehouse_replica.model.constraint import ConstraintSource
from bakehouse_replica.model.decoder import Decoder
from bakehouse_replica.model.device_runner import DeviceRunner, StepLimits
from bakehouse_replica.model.device_sizing import N_NULL_BLOCKS
from bakehouse_replica.model.parallel_ops import ParallelOps
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights

# Larger steps take so long that their launches hide behind them.
MAX_GRAPH_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A model, or one rank's part of it, on its device, and the largest step that it has to do."""

    spec: ModelSpec
    decoder: Decoder
    ops: Ops
    device: torch.device
    block_size: int
    max_model_len: int
    max_step_tokens: int
    max_sequences: int

    @property
    def buckets(self) -> Buckets:
        """The decode steps that are recorded."""
        return buckets_of(
            max_rows=min(self.max_sequences, MAX_GRAPH_ROWS),
            max_blocks=blocks_for(self.max_model_len, self.block_size),
        )

    def kv_shape(self, kv_dtype: torch.dtype) -> KVShape:
        """That of its blocks."""
        return KVShape(
            n_layers=self.spec.n_layers,
            n_kv_heads=self.spec.n_kv_heads,
            head_dim=self.spec.head_dim,
            element_bytes=kv_dtype.itemsize,
            block_size=self.block_size,
        )

    def runner(self, n_blocks: int, constraints: ConstraintSource | None = None) -> DeviceRunner:
        """One with a cache of its own, of `n_blocks` blocks beside the null block; nothing is recorded yet."""
        cache = self.ops.new_cache(
            n_layers=self.spec.n_layers,
            n_blocks=n_blocks + N_NULL_BLOCKS,
            block_size=self.block_size,
            n_kv_heads=self.spec.n_kv_heads,
            head_dim=self.spec.head_dim,
        )
        return DeviceRunner(
            decoder=self.decoder,
            cache=cache,
            ops=self.ops,
            device=self.device,
            limits=StepLimits(max_tokens=self.max_step_tokens, max_sequences=self.max_sequences),
            buckets=self.buckets,
            constraints=constraints,
        )


def device_model(
    spec: ModelSpec,
    weights: DecoderWeights,
    ops: Ops,
    collective: Collective | None = None,
    *,
    block_size: int,
    max_model_len: int,
    sizes: StepSizes,
) -> DeviceModel:
    """The model on the device of its weights. With a `collective`, spec and weights are those of its rank."""
    if collective is not None and collective.size > 1:
        ops = ParallelOps(ops, collective)
    return DeviceModel(
        spec=spec,
        decoder=Decoder(spec, weights, ops, collective),
        ops=ops,
        device=weights.embedding_VE.device,
        block_size=block_size,
        max_model_len=max_model_len,
        max_step_tokens=sizes.max_step_tokens,
        max_sequences=sizes.max_sequences,
    )
