"""One decoder for the Llama family, configured by its spec; it holds weights and nothing else.

Shape legend in `bakehouse_kernels.layout`; R counts rows whose logits are wanted, V the vocabulary.
"""

from dataclasses import replace

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import KVCache
from torch import Tensor
from torch.nn import functional

from bakehouse_replica.model.batch import BatchTensors
from bakehouse_replica.model.layers import attention, feed_forward, rope_rows
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights, LayerWeights


class Decoder:
    """Turns a step's tokens into hidden states and logits, reading and writing the KV cache it is given."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, ops: Ops) -> None:
        self._spec = spec
        self._embedding_VE = weights.embedding_VE
        self._final_norm_E = weights.final_norm_E
        self._ops = ops
        self._layers = tuple(_packed(layer, ops) for layer in weights.layers)
        # A tied embedding stands in memory twice: rows are looked up in it, which the packed form cannot do.
        self._head_EV = ops.pack(weights.head_VE.t())
        device = weights.embedding_VE.device
        self._rope_frequencies_D2 = torch.tensor(spec.rope_frequencies, dtype=torch.float32, device=device)

    @property
    def n_vocabulary(self) -> int:
        """V: how many logits a row has."""
        return self._spec.vocabulary_size

    @torch.inference_mode()
    def forward(self, batch: BatchTensors, cache: KVCache) -> Tensor:
        """What the last layer makes of each token, `[T, E]`; `logits` of the rows that are wanted.

        Writes the keys and values of all tokens into `cache`, which must hold those of the contexts before them.
        """
        spec, ops = self._spec, self._ops
        x_TE = functional.embedding(batch.token_ids_T, self._embedding_VE)
        rope = rope_rows(self._rope_frequencies_D2, batch.positions_T, spec.rope_gain)
        for layer, layer_weights in enumerate(self._layers):
            normed_TE = ops.rms_norm(x_TE, layer_weights.attention_norm_E, spec.norm_eps)
            x_TE = x_TE + attention(normed_TE, layer_weights, spec, ops, cache, layer, batch, rope)
            normed_TE = ops.rms_norm(x_TE, layer_weights.feed_forward_norm_E, spec.norm_eps)
            x_TE = x_TE + feed_forward(normed_TE, layer_weights, ops)
        return x_TE

    @torch.inference_mode()
    def logits(self, x_RE: Tensor) -> Tensor:
        """The logits after some rows of `forward`, float32 `[R, V]`."""
        normed_RE = self._ops.rms_norm(x_RE, self._final_norm_E, self._spec.norm_eps)
        return self._ops.linear(normed_RE, self._head_EV).float()


def _packed(layer: LayerWeights, ops: Ops) -> LayerWeights:
    return replace(
        layer,
        qkv_EX=ops.pack(layer.qkv_EX),
        output_QE=ops.pack(layer.output_QE),
        gate_up_EF2=ops.pack(layer.gate_up_EF2),
        down_FE=ops.pack(layer.down_FE),
    )
