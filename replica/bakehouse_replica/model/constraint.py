"""The seam between sampler and grammars: which tokens an output may go on with.

`bakehouse_replica.model.grammar` implements it; the sampler knows no more of grammars than this.
"""

from typing import Protocol

from torch import Tensor

from bakehouse_replica.core.errors import InvalidRequest
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Sample


class ConstraintFailure(Exception):
    """This output's constraint cannot go on; its message is fit for the client. Its neighbours are unaffected."""


class Constraint(Protocol):
    """What one output may go on with, after the tokens it has so far."""

    def allowed(self, n_vocabulary: int) -> Tensor:
        """bool[V]: the tokens that may follow, stop ids among them where the output may end here.

        Raises `ConstraintFailure`.
        """
        ...

    def is_complete_after(self, token_id: int) -> bool:
        """Whether nothing but an end may follow `token_id`, which is one of the allowed; changes nothing."""
        ...


class ConstraintSource(Protocol):
    """Makes constraints; keeps compiled grammars and running matchers, only ever to save work."""

    def prepare(self, params: SamplingParams) -> None:
        """Compile what `params` ask for; any thread, may take seconds. Raises `InvalidRequest`."""
        ...

    def constraint(self, sequence_id: int, sample: Sample) -> Constraint | None:
        """The constraint of a sequence that has put out `sample.output_ids`; None where it has none.

        The same for all draws of a fork. Raises `ConstraintFailure`.
        """
        ...


class _Broken:
    """The constraint of an output whose own could not be made."""

    def __init__(self, failure: ConstraintFailure) -> None:
        self._failure = failure

    def allowed(self, n_vocabulary: int) -> Tensor:
        """Raises the failure."""
        raise self._failure

    def is_complete_after(self, token_id: int) -> bool:
        """Raises the failure."""
        raise self._failure


def prepare_constraint(source: ConstraintSource | None, params: SamplingParams) -> None:
    """Compiles the grammar that `params` ask for, if any. Raises `InvalidRequest` where there is no source."""
    if params.grammar is None:
        return
    if source is None:
        raise InvalidRequest(
            "this replica has no grammars: response_format, structured_outputs and forced tool calls "
            "cannot be had here",
            "structured_outputs",
        )
    source.prepare(params)


def constraint_of(source: ConstraintSource | None, sequence_id: int, sample: Sample) -> Constraint | None:
    """The sequence's constraint, if it has any; where its source fails, one that fails when the token is drawn.

    So that a failure stays that of one row.
    """
    if sample.params.grammar is None:
        return None
    assert source is not None, f"sequence {sequence_id} has a grammar that nobody has prepared"
    try:
        return source.constraint(sequence_id, sample)
    except ConstraintFailure as failure:
        return _Broken(failure)
