"""What a gateway tells Prometheus, read back by Prometheus' own parser."""

from dataclasses import replace

import pytest
from bakehouse_replica.core.counts import Distribution, Series
from bakehouse_replica.core.errors import Overloaded, RankLost, StartupError
from bakehouse_replica.core.metric_table import (
    COPIED_BLOCKS,
    ERROR_CODES,
    KV_BLOCKS,
    METRICS,
    QUEUE_TIME,
    ROUTING_DECISIONS,
    Kind,
    Source,
)
from bakehouse_replica.core.types import ReplicaStatus
from bakehouse_router.admission import WaitingQueue
from bakehouse_router.api.errors import _TABLE, error_code
from bakehouse_router.generation import CallUsage
from bakehouse_router.metrics import GatewayMetrics
from gateways import status, tiny_card
from prometheus_client.parser import text_string_to_metric_families

USAGE = CallUsage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(metrics: GatewayMetrics, *statuses: ReplicaStatus) -> Samples:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.exposition(statuses).decode())
        for sample in family.samples
    }


def test_c63_each_call_gives_one_sample_of_its_first_token_and_aborted_ones_none() -> None:
    metrics = GatewayMetrics()
    for index in range(10):
        watch = metrics.watch("chat")
        is_aborted = index < 2
        for _ in range(0 if is_aborted else 3):
            watch.see_tokens(0, 1, 1)
        watch.end("cancelled" if is_aborted else "complete", USAGE)
    found = samples(metrics)
    assert found["bakehouse_time_to_first_token_seconds_count", ("chat",)] == 8
    assert found["bakehouse_requests_total", ("chat", "complete")] == 8
    assert found["bakehouse_requests_total", ("chat", "cancelled")] == 2


def test_computed_and_cached_prompt_tokens_are_counted_apart() -> None:
    metrics = GatewayMetrics()
    metrics.watch("completion").end("complete", USAGE)
    found = samples(metrics)
    assert found["bakehouse_prompt_tokens_total", ("computed",)] == 6
    assert found["bakehouse_prompt_tokens_total", ("cached",)] == 4


@pytest.mark.parametrize("outcome", ["cancelled", "engine_dead"])
def test_the_prompt_of_a_call_counts_once_it_has_brought_a_token_however_it_ends(outcome: str) -> None:
    metrics = GatewayMetrics()
    watch = metrics.watch("chat")
    watch.see_tokens(0, 1, 1)
    watch.end(outcome, USAGE)
    found = samples(metrics)
    assert found["bakehouse_prompt_tokens_total", ("computed",)] == 6
    assert found["bakehouse_prompt_tokens_total", ("cached",)] == 4


@pytest.mark.parametrize("outcome", ["cancelled", "deadline_exceeded"])
def test_the_prompt_of_a_call_that_ends_before_its_first_token_does_not_count(outcome: str) -> None:
    metrics = GatewayMetrics()
    metrics.watch("chat").end(outcome, USAGE)
    found = samples(metrics)
    assert {found["bakehouse_prompt_tokens_total", (source,)] for source in ("computed", "cached")} == {0}


def test_tokens_of_one_message_share_the_time_since_the_last_and_weigh_as_many() -> None:
    now = [0.0]
    metrics = GatewayMetrics(clock=lambda: now[0])
    watch = metrics.watch("chat")
    for at, prompt, n_tokens, n_choices in (
        (1.0, 0, 2, 2),  # the first of both choices: nothing is between them
        (1.4, 0, 8, 2),  # four each, 0.1 s apart
        (2.0, 1, 3, 1),  # another prompt's first
        (2.6, 1, 1, 1),
    ):
        now[0] = at
        watch.see_tokens(prompt, n_tokens, n_choices)
    found = samples(metrics)
    assert found["bakehouse_inter_token_seconds_count", ()] == 9
    assert found["bakehouse_inter_token_seconds_sum", ()] == pytest.approx(8 * 0.1 + 0.6)
    assert found["bakehouse_inter_token_seconds_bucket", ("0.075",)] == 0
    assert found["bakehouse_inter_token_seconds_bucket", ("0.15",)] == 8
    assert found["bakehouse_inter_token_seconds_bucket", ("+Inf",)] == 9
    assert found["bakehouse_generated_tokens_total", ()] == 14
    assert found["bakehouse_time_to_first_token_seconds_sum", ("chat",)] == 1.0


def test_every_series_of_a_gateway_stands_from_the_start() -> None:
    """Or else the first of them would never be seen as an increase."""
    found = samples(GatewayMetrics())
    for metric in METRICS:
        if metric.source is Source.GATEWAY:
            suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}[metric.kind]
            for labels in metric.label_sets:
                assert found[metric.name + suffix, labels] == 0


def test_the_queue_and_the_decisions_are_shown_as_they_are_when_asked() -> None:
    queue, decisions = WaitingQueue(max_requests=9, max_tokens=999), {"prefix": 3}
    metrics = GatewayMetrics(queue=queue, decisions=lambda: decisions)
    queue.enter(2, 70)
    found = samples(metrics)
    assert found["bakehouse_queued_requests", ()] == 2
    assert found["bakehouse_queued_prompt_tokens", ()] == 70
    assert found[f"{ROUTING_DECISIONS.name}_total", ("prefix",)] == 3


def test_rejections_are_counted_by_the_code_that_clients_get() -> None:
    metrics = GatewayMetrics()
    for error in (Overloaded("full"), RankLost("rank 1"), StartupError("no client's"), KeyError("a bug")):
        metrics.reject(error)
    found = samples(metrics)
    assert found["bakehouse_rejections_total", ("overloaded",)] == 1
    assert found["bakehouse_rejections_total", ("engine_dead",)] == 1
    assert found["bakehouse_rejections_total", ("internal_error",)] == 2
    assert sum(value for (name, _), value in found.items() if name == "bakehouse_rejections_total") == 4


def test_the_table_of_metrics_knows_every_code_of_the_table_of_errors() -> None:
    assert set(ERROR_CODES) == {*(code for *_, code in _TABLE), error_code(KeyError())}


def test_a_replica_shows_what_it_has_counted_until_it_has_gone() -> None:
    metrics = GatewayMetrics()
    queued = Distribution((*(0,) * 9, *(3,) * (len(QUEUE_TIME.bounds) - 8)), 4.5)
    counted = (
        Series(KV_BLOCKS.name, ("free",), 256),
        Series(COPIED_BLOCKS.name, (), 7),
        Series(QUEUE_TIME.name, (), queued),
    )
    one = replace(status(tiny_card("a")), counted=counted)
    found = samples(metrics, one, status(tiny_card("b"), problem="silent for 1.0 s"))
    assert found["bakehouse_kv_blocks", ("a", "free")] == 256
    assert found["bakehouse_copied_blocks_total", ("a",)] == 7
    assert found["bakehouse_queue_time_seconds_count", ("a",)] == 3
    assert found["bakehouse_queue_time_seconds_sum", ("a",)] == 4.5
    assert found["bakehouse_queue_time_seconds_bucket", ("0.5", "a")] == 0
    assert found["bakehouse_queue_time_seconds_bucket", ("2.5", "a")] == 3
    assert (found["bakehouse_replica_serves", ("a",)], found["bakehouse_replica_serves", ("b",)]) == (1, 0)
    assert ("bakehouse_kv_blocks", ("a", "free")) not in samples(metrics)
