"""The numbers of a measurement, against values worked out by hand."""

import numpy as np
import pytest
from bakehouse_cluster.bench.records import Outcome, Record
from bakehouse_cluster.bench.statistics import distribution, summarize, token_latencies
from hypothesis import given
from hypothesis import strategies as st


def record(
    outcome: Outcome = Outcome.OK,
    *,
    due_s: float = 0.0,
    sent_s: float | None = None,
    frame_s: tuple[float, ...] = (1.0,),
    frame_tokens: tuple[float, ...] | None = None,
    ended_s: float | None = None,
    n_input: int | None = 10,
    n_output: int = 1,
    n_input_planned: int | None = 10,
    problem: str | None = None,
) -> Record:
    return Record(
        outcome=outcome,
        due_s=due_s,
        sent_s=due_s if sent_s is None else sent_s,
        ended_s=frame_s[-1] if ended_s is None else ended_s,
        frame_s=frame_s,
        frame_tokens=(1.0,) * len(frame_s) if frame_tokens is None else frame_tokens,
        n_input=n_input,
        n_output=n_output,
        n_input_planned=n_input_planned,
        problem=problem,
    )


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    found = distribution(values[::-1])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == (50, 90, 99, 100, 50.5)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=30))
def test_a_weight_counts_a_value_so_many_times(weighted: list[tuple[float, int]]) -> None:
    values, weights = zip(*weighted, strict=True)
    found = distribution(values, weights)
    spelled_out = np.repeat(values, weights)
    assert found is not None
    expected = np.percentile(spelled_out, [50, 90, 99], method="inverted_cdf")
    assert (found.p50, found.p90, found.p99) == tuple(expected)
    assert found.mean == pytest.approx(spelled_out.mean())


def test_of_nothing_there_is_no_distribution() -> None:
    assert distribution([]) is None


def test_a_gap_before_a_frame_of_several_tokens_counts_as_several_shorter_ones() -> None:
    one = record(frame_s=(1.0, 1.5, 2.5, 2.6), frame_tokens=(2, 1, 4, 1))
    latencies, weights = token_latencies(one)
    assert latencies == pytest.approx([0.5, 0.25, 0.1])
    assert weights == [1, 4, 1]


def test_a_frame_without_a_token_has_its_gap_once() -> None:
    latencies, weights = token_latencies(record(frame_s=(1.0, 1.5), frame_tokens=(1, 0)))
    assert (latencies, weights) == ([0.5], [1])


def test_two_streams_by_hand() -> None:
    summary = summarize(
        [
            record(due_s=10, sent_s=10.25, frame_s=(11, 12, 14), ended_s=14.5, n_output=3),
            record(due_s=12, frame_s=(15, 16), frame_tokens=(1, 3), ended_s=20, n_output=4, n_input=30),
        ]
    )
    assert summary.duration_s == 10
    assert (summary.n_input_tokens, summary.n_output_tokens, summary.n_frames) == (40, 7, 5)
    assert summary.output_tokens_per_s == pytest.approx(0.7)
    assert summary.total_tokens_per_s == pytest.approx(4.7)
    assert summary.requests_per_s == pytest.approx(0.2)
    assert summary.n_input_other == 1
    assert summary.max_send_delay_s == 0.25
    assert summary.ttft_s is not None
    assert (summary.ttft_s.p50, summary.ttft_s.max) == (1, 3)  # from when it was due
    assert summary.gap_s is not None
    assert (summary.gap_s.p50, summary.gap_s.max) == (1, 2)
    assert summary.itl_s is not None
    assert summary.itl_s.mean == pytest.approx((1 + 2 + 3 * (1 / 3)) / 5)
    assert summary.e2e_s is not None
    assert (summary.e2e_s.p50, summary.e2e_s.max) == (4.5, 8)


def test_what_failed_counts_in_shares_and_in_time_but_not_in_tokens_or_latencies() -> None:
    summary = summarize(
        [
            record(n_output=1),
            record(Outcome.SHORT, n_output=2, frame_s=(1.0,), problem="short"),
            record(Outcome.SHED, frame_s=(), frame_tokens=(), ended_s=0.1, n_output=0, problem="busy"),
            record(Outcome.SHED, frame_s=(), frame_tokens=(), ended_s=0.1, n_output=0, problem="busy"),
            record(Outcome.ABORTED, frame_s=(0.5, 0.6), ended_s=9.0, n_output=2, problem="gone"),
        ]
    )
    assert summary.duration_s == 9
    assert {outcome: summary.share(outcome) for outcome in Outcome} == {
        Outcome.OK: 0.2,
        Outcome.SHORT: 0.2,
        Outcome.ERROR: 0,
        Outcome.SHED: 0.4,
        Outcome.ABORTED: 0.2,
    }
    assert summary.n_output_tokens == 3
    assert summary.requests_per_s == pytest.approx(2 / 9)
    assert summary.ttft_s is not None
    assert summary.ttft_s.max == 1
    assert summary.e2e_s is not None
    assert (summary.e2e_s.p50, summary.e2e_s.max) == (1, 1)
    assert summary.problems == {"busy": 2, "short": 1, "gone": 1}


def test_no_request_at_all_is_no_division_by_zero() -> None:
    summary = summarize([])
    assert (summary.output_tokens_per_s, summary.share(Outcome.OK), summary.ttft_s) == (0, 0, None)
