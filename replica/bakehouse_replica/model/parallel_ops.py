"""The operations of a decoder of which several ranks hold a part each.

Shape legend in `bakehouse_kernels.layout`; R counts rows whose logits are wanted, V the vocabulary, C a rank's
part of it.
"""

from collections.abc import Callable

from bakehouse_kernels.api import Ops, Packed, Recording
from bakehouse_kernels.reference import PlayedAnew
from torch import Tensor
from torch.nn import functional

from bakehouse_replica.model.collective import Collective
from bakehouse_replica.model.sharding import Shard, own_tokens


class ParallelOps:
    """An `Ops` whose `add_linear` adds the sum of all ranks' products; all else concerns one rank alone."""

    def __init__(self, own: Ops, collective: Collective) -> None:
        self._own = own
        self._collective = collective
        self.pack = own.pack
        self.pack_gated = own.pack_gated
        self.linear = own.linear
        self.gated_linear = own.gated_linear
        self.rms_norm = own.rms_norm
        self.new_cache = own.new_cache
        self.rope_and_write = own.rope_and_write
        self.plan_attention = own.plan_attention
        self.paged_attention = own.paged_attention
        self.copy_blocks = own.copy_blocks
        self.survey = own.survey
        self.adjust = own.adjust
        self.draw = own.draw

    def add_linear(self, x_TO: Tensor, input_TI: Tensor, packed: Packed, bias_O: Tensor | None = None) -> None:
        """`x += Σ (input @ weight + bias)` over the ranks, of which one has the bias; modifies `x`."""
        product_TO = self._own.linear(input_TI, packed, bias_O)
        self._collective.sum_(product_TO)
        x_TO += product_TO

    def record(self, work: Callable[[Ops], Tensor]) -> Recording:
        """Notes the sums, too, where a recording can hold them; otherwise does the work anew each time."""
        if self._collective.is_recordable:
            recording = self._own.record(lambda noting: work(ParallelOps(noting, self._collective)))
            return _Counted(recording, self._collective)
        return PlayedAnew(self, work)


class _Counted:
    """A recording whose plays are seen by whoever watches how far ranks are."""

    def __init__(self, inner: Recording, collective: Collective) -> None:
        self._inner = inner
        self._collective = collective

    @property
    def result(self) -> Tensor:
        """Where the result stands."""
        return self._inner.result

    def play(self) -> None:
        """Once more."""
        self._collective.count_play()
        self._inner.play()


class Vocabulary:
    """The ends of a decoder, where each rank has a range of the tokens: embeddings, and logits."""

    def __init__(self, n_tokens: int, collective: Collective) -> None:
        shards = [Shard(rank, collective.size) for rank in range(collective.size)]
        self._collective = collective
        self._own = own_tokens(n_tokens, shards[collective.rank])
        self._widths = tuple(len(own_tokens(n_tokens, shard)) for shard in shards)

    def embed(self, token_ids_T: Tensor, embedding_CE: Tensor) -> Tensor:
        """The tokens' embeddings, of which each rank looks up its own; `[T, E]`."""
        if self._collective.size == 1:
            return functional.embedding(token_ids_T, embedding_CE)
        row_T = token_ids_T - self._own.start
        is_foreign_T = (row_T < 0) | (row_T >= len(self._own))
        x_TE = functional.embedding(row_T.masked_fill(is_foreign_T, 0), embedding_CE)
        x_TE = x_TE.masked_fill(is_foreign_T[:, None], 0.0)
        self._collective.sum_(x_TE)
        return x_TE

    @property
    def is_first_rank(self) -> bool:
        """Whether all logits come to this rank, which draws."""
        return self._collective.rank == 0

    def agree(self, token_ids_T: Tensor) -> Tensor:
        """The first rank's token ids, which the others' become: modifies them."""
        self._collective.broadcast_(token_ids_T)
        return token_ids_T

    def logits(self, own_RC: Tensor) -> Tensor:
        """All logits of the rows on rank 0, `[R, V]`; nothing of use elsewhere."""
        return self._collective.gather_columns(own_RC, self._widths)
