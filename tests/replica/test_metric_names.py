"""The names of metrics, as the documentation and Ray's dashboard for vLLM know them."""

import re
from collections.abc import Iterable
from pathlib import Path

from bakehouse_replica.core.vllm_table import VLLM_METRICS
from bakehouse_replica.metric_reference import metric_reference
from ray.dashboard.modules.metrics.dashboards.common import Panel, Row
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config

ROOT = Path(__file__).parents[2]
# KV blocks that move to host memory, to other machines or to a cache outside: bakehouse does none of it.
ABSENT = re.compile(r"vllm_(nixl|kv_offload|external_prefix_cache)_")


def expressions(parts: Iterable[Row | Panel]) -> list[str]:
    found: list[str] = []
    for part in parts:
        found += expressions(part.panels) if isinstance(part, Row) else [target.expr for target in part.targets]
    return found


def test_ray_s_serve_llm_dashboard_finds_each_series_it_asks_for() -> None:
    config = serve_llm_dashboard_config
    texts = " ".join(expressions([*(config.rows or ()), *(config.panels or ())]))
    asked = {name for name in re.findall(r"ray_(vllm_\w+)", texts) if not ABSENT.match(name)}
    assert len(asked) > 25
    assert asked <= {name for metric in VLLM_METRICS for name in metric.series_names}


def test_the_page_of_metrics_is_that_of_the_table() -> None:
    command = "PYTHONPATH=replica python -m bakehouse_replica.metric_reference > docs/metrics.md"
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert command in page
    assert page == metric_reference(), f"make it anew: {command}"
