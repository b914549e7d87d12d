"""The steps in flight: their plans, whose their chunks are, and whether a result answers them.

A sequence may end while steps that compute it are in flight: aborted, expired, or by a draw that was applied when
the next step had been planned. Its blocks are given back at once, and may be given out by the very next plan,
although steps in flight still read and write them. That is sound, because steps run in the order planned:

* A stray write goes to positions that no applied step has computed. Only blocks full of applied tokens are ever
  registered, so it meets none that can be found; and it meets none that another table holds, since a table's tail
  is its own before it is written (`BlockPool.writable`).
* A block's next owner writes it in a later step, after all strays, and reads no position before that. It is
  registered again no earlier than that later step is applied.
* A stray copy comes before the writes of its own step, so that all this holds for its target; its source was held
  when it was planned, and whoever gets that block next writes it in a later step.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bakehouse_replica.core.sequence import Sequence, Status
from bakehouse_replica.core.types import Chunk, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that was handed out, with the sequence of each of its chunks."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    planned_at: float

    @property
    def may_be_overtaken(self) -> bool:
        """Whether the next step may be planned before its result is known."""
        chunks = zip(self.plan.chunks, self.sequences, strict=True)
        return all([sequence.may_run_ahead for chunk, sequence in chunks if chunk.sample is not None])

    def check(self, result: StepResult) -> None:
        """Asserts that the result has what the plan asks for, and nothing else, in the plan's order."""
        chunks = self.plan.chunks
        samples = [(chunk.sequence_id, sample) for chunk in chunks if (sample := chunk.sample) is not None]
        scores = [(chunk.sequence_id, score) for chunk in chunks if (score := chunk.score) is not None]
        wanted = [(sequence_id, len(sample.seeds)) for sequence_id, sample in samples]
        found = [(sampled.sequence_id, len(sampled.draws)) for sampled in result.sampled]
        assert (result.step, found) == (self.plan.step, wanted), (
            f"step {self.plan.step} wants tokens of {wanted}; the result of step {result.step} has {found}"
        )
        wanted = [(sequence_id, len(score.target_ids)) for sequence_id, score in scores]
        found = [(scored.sequence_id, len(scored.logprobs)) for scored in result.scored]
        assert found == wanted, (
            f"step {self.plan.step} wants scores of {wanted}; the result of step {result.step} has {found}"
        )
        for (sequence_id, sample), sampled in zip(samples, result.sampled, strict=True):
            n_each = 0 if sample.params.logprobs is None else 1
            for draw in sampled.draws:
                token_ids = draw.token_ids
                assert token_ids or draw.is_complete or draw.failure is not None, (
                    f"sequence {sequence_id} got {draw}, which is not whole: it neither goes on nor ends"
                )
                assert len(draw.logprobs) == len(token_ids) * n_each, (
                    f"sequence {sequence_id} got {draw}, which is not whole: {n_each} log-probability each"
                )


def check_flights(flights: Iterable[Flight], alive: Iterable[Sequence]) -> None:
    """Asserts that the sequences stand where the steps in flight put them."""
    booked: defaultdict[Sequence, list[Chunk]] = defaultdict(list)
    for flight in flights:
        for chunk, sequence in zip(flight.plan.chunks, flight.sequences, strict=True):
            booked[sequence].append(chunk)
    for sequence in alive:
        name, position, n_draws = f"sequence {sequence.sequence_id}", sequence.n_applied, 0
        for chunk in booked[sequence]:
            assert sequence.status is Status.RUNNING, f"{name} is {sequence.status.name}, with a step in flight"
            assert chunk.start == position, f"{name} is computed from {chunk.start} on; expected {position}"
            assert chunk.follows_draw or not n_draws, f"{name} does not say which of its tokens is not known"
            position += len(chunk.token_ids)
            n_draws += chunk.sample is not None and len(chunk.sample.seeds) == 1
        assert position == sequence.n_computed, (
            f"{name} counts {sequence.n_computed} tokens; {position} are booked"
        )
        assert n_draws == sequence.n_awaited, f"{name} awaits {sequence.n_awaited} draws; {n_draws} are in flight"
        assert sequence.n_missing > 0 or booked[sequence], f"{name} has nothing left to compute"
