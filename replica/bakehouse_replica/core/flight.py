"""The step in flight: its plan, whose its chunks are, and whether a result answers it."""

from dataclasses import dataclass

from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.types import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Flight:
    """The plan that was handed out, with the sequence of each of its chunks."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    planned_at: float

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
