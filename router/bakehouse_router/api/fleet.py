"""What a gateway knows of its replicas and of itself, as JSON: whole for the console page, less for `/health`."""

from collections.abc import Iterable

from bakehouse_replica.core.counts import Distribution, Series
from bakehouse_replica.core.metric_table import (
    BATCH_FILL,
    GENERATED_TOKENS,
    PREEMPTIONS,
    PREFIX_HIT_TOKENS,
    PREFIX_QUERIED_TOKENS,
    QUEUED_PROMPT_TOKENS,
    QUEUED_REQUESTS,
    STEP_TOKENS,
    Metric,
)
from bakehouse_replica.core.types import ReplicaStatus

from bakehouse_router.api.token_json import Json
from bakehouse_router.gateway import Gateway


def replica_json(status: ReplicaStatus) -> Json:
    """One replica of the health body; its load is a snapshot, at most a status period old."""
    card, load = status.card, status.load
    return {
        "id": card.replica_id,
        "serves": status.problem is None,
        "problem": status.problem,
        "block_size": card.block_size,
        "n_blocks": card.n_blocks,
        "kv_bytes": card.kv_bytes,
        "max_model_len": card.max_model_len,
        "load": {
            "n_running": load.n_running,
            "n_waiting": load.n_waiting,
            "waiting_tokens": load.waiting_tokens,
            "n_free_blocks": load.n_free_blocks,
            "n_cached_blocks": load.n_cached_blocks,
            "n_held_blocks": load.n_held_blocks,
        },
    }


def fleet_json(gateway: Gateway, statuses: Iterable[ReplicaStatus], gateway_id: str | None) -> Json:
    """The body of `GET /v1/replicas`. `gateway_id`: by which the log knows this gateway, where it is known."""
    counted = _Counted(gateway.metrics.series())
    return {
        "object": "list",
        "data": [_told_whole(status) for status in statuses],
        "gateway": {
            "id": gateway_id,
            "model": gateway.model_name,
            "n_open": gateway.records.n_open,
            "n_waiting": counted.value(QUEUED_REQUESTS),
            "waiting_tokens": counted.value(QUEUED_PROMPT_TOKENS),
            "generated_tokens": counted.value(GENERATED_TOKENS),
        },
    }


def _told_whole(status: ReplicaStatus) -> Json:
    return replica_json(status) | {
        "max_sequences": status.card.max_sequences,
        "step_time_s": status.load.step_time_s,
        "age_s": status.age_s,
        "counted": _replica_counts(_Counted(status.counted)) if status.counted else None,
    }


def _replica_counts(counted: "_Counted") -> Json:
    """Since the replica started; what it did in a time is the difference of two reports."""
    return {
        "steps": counted.distribution(BATCH_FILL).at_most[-1],
        "computed_tokens": int(counted.distribution(STEP_TOKENS).total),
        "preemptions": counted.value(PREEMPTIONS),
        "prefix_queried_tokens": counted.value(PREFIX_QUERIED_TOKENS),
        "prefix_hit_tokens": counted.value(PREFIX_HIT_TOKENS),
    }


class _Counted:
    """Series of metrics without labels, by name."""

    def __init__(self, series: Iterable[Series]) -> None:
        self._values = {each.name: each.value for each in series if not each.labels}

    def value(self, metric: Metric) -> int:
        value = self._values[metric.name]
        assert not isinstance(value, Distribution), f"{metric.name} is a histogram"
        return int(value)

    def distribution(self, metric: Metric) -> Distribution:
        value = self._values[metric.name]
        assert isinstance(value, Distribution), f"{metric.name} is no histogram"
        return value
