"""What a gateway tells Prometheus, read back by Prometheus' own parser."""

from bakehouse_router.generation import CallUsage
from bakehouse_router.metrics import GatewayMetrics
from gateways import status, tiny_card
from prometheus_client.parser import text_string_to_metric_families

USAGE = CallUsage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)


def samples(metrics: GatewayMetrics, *replica_ids: str) -> dict[tuple[str, tuple[str, ...]], float]:
    text = metrics.exposition([status(tiny_card(replica_id)) for replica_id in replica_ids]).decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_c63_each_call_gives_one_sample_of_its_first_token_and_aborted_ones_none() -> None:
    metrics = GatewayMetrics()
    for index in range(10):
        watch = metrics.watch("chat")
        is_aborted = index < 2
        for _ in range(0 if is_aborted else 3):
            watch.see_token()
        watch.end("cancelled" if is_aborted else "complete", USAGE)
    found = samples(metrics)
    assert found["bakehouse_time_to_first_token_seconds_count", ("chat",)] == 8
    assert found["bakehouse_calls_total", ("chat", "complete")] == 8
    assert found["bakehouse_calls_total", ("chat", "cancelled")] == 2


def test_computed_and_cached_prompt_tokens_are_counted_apart() -> None:
    metrics = GatewayMetrics()
    metrics.watch("completion").end("complete", USAGE)
    found = samples(metrics)
    assert found["bakehouse_prompt_tokens_total", ("computed",)] == 6
    assert found["bakehouse_prompt_tokens_total", ("cached",)] == 4
    assert found["bakehouse_output_tokens_total", ()] == 3


def test_a_replica_that_has_gone_is_no_longer_shown() -> None:
    metrics = GatewayMetrics()
    assert samples(metrics, "a", "b")["bakehouse_free_blocks", ("a",)] == 256
    assert ("bakehouse_free_blocks", ("a",)) not in samples(metrics, "b")
