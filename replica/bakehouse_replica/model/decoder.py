"""One decoder for the Llama family, configured by its spec; it holds weights and nothing else.

Shape legend in `bakehouse_kernels.layout`; R counts rows whose logits are wanted, V the vocabulary.
"""

import torch
from bakehouse_kernels.api import Ops
from bakehouse_kernels.layout import KVCache
from torch import Tensor

from bakehouse_replica.model.batch import BatchTensors
from bakehouse_replica.model.collective import Alone, Collective
from bakehouse_replica.model.layers import Step, feed_forward, normed_heads, pack_layer, rope_rows
from bakehouse_replica.model.parallel_ops import Vocabulary
from bakehouse_replica.model.spec import ModelSpec
from bakehouse_replica.model.weights import DecoderWeights


class Decoder:
    """Turns a step's tokens into hidden states and logits, reading and writing the KV cache it is given."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, ops: Ops, collective: Collective | None = None
    ) -> None:
        """One of several ranks' parts with a `collective`: spec, weights and `ops` are then that rank's."""
        self._spec = spec
        self._vocabulary = Vocabulary(spec.vocabulary_size, collective or Alone())
        self._embedding_VE = weights.embedding_VE
        self._final_norm_E = weights.final_norm_E
        self._ops = ops
        self._layers = tuple(pack_layer(layer, ops) for layer in weights.layers)
        # A tied embedding stands in memory twice: rows are looked up in it, which the packed form cannot do.
        self._head = ops.pack(weights.head_VE.t())
        device = weights.embedding_VE.device
        self._rope_frequencies_D2 = torch.tensor(spec.rope_frequencies, dtype=torch.float32, device=device)

    @property
    def n_vocabulary(self) -> int:
        """V: how many logits a row has."""
        return self._spec.vocabulary_size

    @property
    def is_first_rank(self) -> bool:
        """Whether `logits` gives this rank all of them: of several ranks, only the first one."""
        return self._vocabulary.is_first_rank

    @property
    def is_ops_alone(self) -> bool:
        """Whether `layers` calls nothing but operations where all rows are wanted, so that `Ops.record` may do."""
        return not self._spec.has_qk_norm

    @torch.inference_mode()
    def forward(self, batch: BatchTensors, cache: KVCache, wanted_R: Tensor | None = None) -> Tensor:
        """What the last layer makes of the tokens whose rows are `wanted` (int64; None: of all), `[R, E]`.

        Writes the keys and values of all tokens into `cache`, which must hold those of the contexts before them.
        """
        x_TE = self.embed(batch.token_ids_T)
        cos_TD, sin_TD = self.rope_rows(batch.positions_T)
        plan = self._ops.plan_attention(batch.block_table_SB, batch.query_start_S1, batch.context_len_S)
        step = Step(cos_TD=cos_TD, sin_TD=sin_TD, slots_T=batch.slots_T, plan=plan)
        return self.layers(x_TE, step, cache, self._ops, wanted_R)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """What the first layer gets of these tokens, `[T, E]`."""
        return self._vocabulary.embed(token_ids_T, self._embedding_VE)

    def embed_drawn(self, token_ids_T: Tensor) -> Tensor:
        """`embed` of the first rank's ids, which alone knows what it has drawn; modifies those of the others."""
        return self.embed(self._vocabulary.agree(token_ids_T))

    def rope_rows(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `Step`."""
        return rope_rows(self._rope_frequencies_D2, positions_T, self._spec.rope_gain)

    def layers(self, x_TE: Tensor, step: Step, cache: KVCache, ops: Ops, wanted_R: Tensor | None = None) -> Tensor:
        """`forward` after the embedding, by operations of `ops` alone where all rows are wanted; modifies `x`."""
        for layer in range(self._spec.n_layers - 1):
            attended_TQ = self._attend(x_TE, layer, cache, step, ops)
            self._finish(x_TE, attended_TQ, layer, ops)
        # Of the last layer, a token that nobody wants needs its key and value alone.
        last = self._spec.n_layers - 1
        attended_TQ = self._attend(x_TE, last, cache, step, ops)
        if wanted_R is not None:
            x_TE, attended_TQ = x_TE[wanted_R], attended_TQ[wanted_R]
        self._finish(x_TE, attended_TQ, last, ops)
        return x_TE

    @torch.inference_mode()
    def logits(self, x_RE: Tensor) -> Tensor:
        """The logits after some rows of `forward`, float32 `[R, V]`; of several ranks, rank 0 has them."""
        normed_RE = self._ops.rms_norm(x_RE, self._final_norm_E, self._spec.norm_eps)
        return self._vocabulary.logits(self._ops.linear(normed_RE, self._head)).float()

    def _attend(self, x_TE: Tensor, layer: int, cache: KVCache, step: Step, ops: Ops) -> Tensor:
        """Write the tokens' keys and values, then attend; `[T, N·D]`."""
        spec, packed = self._spec, self._layers[layer]
        normed_TE = ops.rms_norm(x_TE, packed.attention_norm_E, spec.norm_eps)
        qkv_TX = ops.linear(normed_TE, packed.qkv, packed.qkv_bias_X)
        qkv_TX = normed_heads(qkv_TX, packed, ops, spec.norm_eps, spec.n_kv_heads)
        q_TND = ops.rope_and_write(qkv_TX, step.cos_TD, step.sin_TD, cache, layer, step.slots_T)
        attended_TND = ops.paged_attention(
            q_TND, cache, layer, step.plan, scale=spec.head_dim**-0.5, window=spec.window
        )
        return attended_TND.flatten(1)

    def _finish(self, x_TE: Tensor, attended_TQ: Tensor, layer: int, ops: Ops) -> None:
        """What follows attention in a layer, added to `x`."""
        packed = self._layers[layer]
        ops.add_linear(x_TE, attended_TQ, packed.output, packed.output_bias_E)
        feed_forward(x_TE, packed, ops, self._spec.norm_eps)
