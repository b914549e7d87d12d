"""How the tokens of a step are shared out."""

import pytest
from bakehouse_replica.core.budget import StepBudget
from bakehouse_replica.core.call import Call
from bakehouse_replica.core.sequence import Sequence
from bakehouse_replica.core.types import Capacity, SchedulingPolicy
from driving import make_request

CAPACITY = Capacity(n_blocks=1000, block_size=4, max_step_tokens=20, max_sequences=8)
POLICY = SchedulingPolicy(max_model_len=1000, max_prefill_tokens=10, long_prefill_tokens=30, max_long_prefills=2)


def make_sequence(n_missing: int) -> Sequence:
    request = make_request("r", range(100))
    call = Call.of(request, arrival=0, now=0.0, n_output_limit=8, root_hash=b"")
    sequence = Sequence.first(call, 0, 7)
    sequence.n_computed = 100 - n_missing
    return sequence


@pytest.mark.parametrize(
    ("missing", "granted", "n_left"),
    [
        ([], [], 20),
        ([1, 1, 1], [1, 1, 1], 10),  # while anything decodes, prefill is capped at 10
        ([25], [20], 0),
        ([1, 25], [1, 10], 0),
        ([5, 1, 25], [5, 1, 5], 0),  # in order of service
        ([12, 12], [12, 8], 0),
        ([50], [10], 10),  # half is left for newcomers; what they leave over is filled in later
        ([1, 50], [1, 5], 5),
        ([50, 25], [10, 10], 0),  # the short one is first in its half, the long one sure of its own
        ([50, 60], [10, 0], 10),
    ],
)
def test_decodes_come_first_then_short_prefills_and_long_ones_keep_half(
    missing: list[int], granted: list[int], n_left: int
) -> None:
    sequences = [make_sequence(n_missing) for n_missing in missing]
    budget = StepBudget.shared_among(sequences, CAPACITY, POLICY)
    assert [budget.grants.get(sequence, 0) for sequence in sequences] == granted
    assert budget.prefill_left == n_left


@pytest.mark.parametrize(
    ("drawn", "prefills", "granted", "n_left"),
    [
        ([4, 4], [], [4, 4], 10),
        ([1, 4, 2], [25], [1, 4, 2, 10], 0),
        ([9, 9, 9], [], [9, 9, 2], 0),  # in order of service, but one is sure for everybody
        ([30, 4], [], [19, 1], 0),
        ([30, 4], [5, 50], [17, 1, 1, 1], 0),  # and for everybody who is in prefill
    ],
)
def test_tokens_drawn_ahead_come_before_prefill_and_leave_one_for_everybody(
    drawn: list[int], prefills: list[int], granted: list[int], n_left: int
) -> None:
    decoding = [make_sequence(n_drawn) for n_drawn in drawn]
    for sequence in decoding:
        sequence.n_drawn = sequence.n_missing
    sequences = [*decoding, *map(make_sequence, prefills)]
    budget = StepBudget.shared_among(sequences, CAPACITY, POLICY)
    assert [budget.grants.get(sequence, 0) for sequence in sequences] == granted
    assert budget.prefill_left == n_left


@pytest.mark.parametrize(
    ("n_missing", "n_drawn", "is_ample"),
    [([1, 1], 1, True), ([1, 5], 1, False), ([1, 50], 1, False), ([9, 9, 9], 9, False)],
)
def test_a_budget_is_ample_only_where_who_runs_has_all_that_it_misses(
    n_missing: list[int], n_drawn: int, is_ample: bool
) -> None:
    sequences = [make_sequence(n) for n in n_missing]
    for sequence in sequences:
        sequence.n_drawn = n_drawn
    assert StepBudget.shared_among(sequences, CAPACITY, POLICY).is_ample is is_ample


def test_what_is_withdrawn_goes_to_others() -> None:
    first, second = make_sequence(12), make_sequence(12)
    budget = StepBudget.shared_among([first, second], CAPACITY, POLICY)
    budget.withdraw(first)
    assert budget.grant(second) == 4
    assert (budget.grants, budget.prefill_left) == ({second: 12}, 8)


def test_a_grant_is_never_more_than_is_missing_left_or_allowed() -> None:
    sequence = make_sequence(9)
    budget = StepBudget(prefill_left=7)
    assert budget.grant(sequence, n_most=2) == 2
    assert budget.grant(sequence) == 5
    assert budget.grant(sequence) == 0
    assert budget.grants == {sequence: 7}
