"""The metrics as a page of documentation.

python -m bakehouse_replica.metric_reference > docs/metrics.md
"""

from collections.abc import Iterable

from bakehouse_replica.core.metric_table import METRICS, Kind, Metric, Source
from bakehouse_replica.core.vllm_table import VLLM_METRICS

_HEAD = """# Metrics

Made of the table in `replica/bakehouse_replica/core/metric_table.py` by
`PYTHONPATH=replica python -m bakehouse_replica.metric_reference > docs/metrics.md`.

Each metric can be read in two places:

* **Ray's agents**, one a node, as `ray_NAME`, with the labels `application`, `deployment` and `replica` of Ray
  Serve beside those below. Prometheus finds the agents by the file `prom_metrics_service_discovery.json` in Ray's
  temporary folder. What is counted arrives there some seconds later: each process hands it over once a second, and
  Ray exports it every 10 s.
* **`GET /metrics` of a gateway**, as `NAME`, without delay: what that gateway counts, and what replicas have
  told it that they count, with the label `replica`. Of one that is silent, it shows that it does not serve.

A counter is read as `NAME_total`, a histogram as `NAME_bucket`, `NAME_sum` and `NAME_count` (in Ray's agents these
three have the type gauge; `rate` and `histogram_quantile` do not mind). Every series stands from the start, at 0,
but for those by `tenant`, which begin with a tenant's first request and stay until the gateway ends. Whoever reads
a gateway's `/metrics` with a key sees no other tenant's. Labels have the values below and no others; models and
users are no labels. Responses count as `chat`. The probe by which a gateway finds out that its model answers,
once, counts at the replica like any request, and at the gateway not at all.
"""
_VLLM = """
## Names of vLLM

`metrics.vllm_names: true` adds these to those of replicas, in Ray's agents only and with the label `model_name`,
so that dashboards for vLLM fill, such as Ray's own "Serve LLM".
"""


def _row(metric: Metric) -> str:
    labels = "<br>".join(
        f"`{label.name}`: {label.arriving or ', '.join(f'`{value}`' for value in label.values)}"
        for label in metric.labels
    )
    kind = metric.kind.value
    if metric.kind is Kind.HISTOGRAM:
        kind += f", {metric.bounds[0]:g} to {metric.bounds[-1]:g}"
    return f"| `{metric.name}` | {kind} | {metric.unit} | {labels} | {metric.meaning} |\n"


def _table(metrics: Iterable[Metric]) -> str:
    rows = "".join(map(_row, metrics))
    return f"\n| name | kind | unit | labels | meaning |\n|---|---|---|---|---|\n{rows}"


def metric_reference() -> str:
    """The page, in Markdown."""
    page = _HEAD
    for source, title in ((Source.GATEWAY, "Gateways"), (Source.REPLICA, "Replicas")):
        page += f"\n## {title}\n" + _table(metric for metric in METRICS if metric.source is source)
    return page + _VLLM + _table(VLLM_METRICS)


if __name__ == "__main__":
    print(metric_reference(), end="")
