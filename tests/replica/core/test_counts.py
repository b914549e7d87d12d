"""Counts in plain numbers: every series from the start, samples in their buckets, copies that stay as they are."""

import pytest
from bakehouse_replica.core.counts import Counts, Distribution, Series
from bakehouse_replica.core.metric_table import Kind, Label, Metric, Source

LABEL = Label("state", ("free", "held"))
FOUND = Metric(name="found", kind=Kind.COUNTER, unit="blocks", meaning="", source=Source.REPLICA)
BLOCKS = Metric(name="blocks", kind=Kind.GAUGE, unit="blocks", meaning="", source=Source.REPLICA, labels=(LABEL,))
TIMES = Metric(
    name="times", kind=Kind.HISTOGRAM, unit="seconds", meaning="", source=Source.REPLICA, bounds=(0.1, 1.0)
)


def made() -> Counts:
    return Counts((FOUND, BLOCKS, TIMES))


def test_every_series_stands_at_0_from_the_start() -> None:
    assert made().series() == (
        Series("found", (), 0),
        Series("blocks", ("free",), 0),
        Series("blocks", ("held",), 0),
        Series("times", (), Distribution((0, 0, 0), 0.0)),
    )


def test_a_sample_on_a_bound_is_within_it_and_weighs_as_many_as_it_stands_for() -> None:
    counts = made()
    counts.observe(TIMES, 0.1)
    counts.observe(TIMES, 0.5, weight=4)
    counts.observe(TIMES, 7.0)
    assert counts.series()[-1].value == Distribution((1, 5, 6), 0.1 + 4 * 0.5 + 7.0)


def test_series_once_taken_do_not_change() -> None:
    counts = made()
    before = counts.series()
    counts.add(FOUND, 3)
    counts.put(BLOCKS, 7, "held")
    counts.observe(TIMES, 1.0)
    assert before == made().series()
    assert [series.value for series in counts.series()][:3] == [3, 0, 7]


def test_labels_beyond_the_table_are_refused() -> None:
    with pytest.raises(KeyError):
        made().add(FOUND, 1, "tenant")
    with pytest.raises(AssertionError, match="blocks has no series \\('lost',\\)"):
        made().put(BLOCKS, 1, "lost")
