"""What is drawn: four dashboards over the metrics of the table, each of which is drawn somewhere."""

from bakehouse_replica.core.metric_table import (
    BATCH_FILL,
    COPIED_BLOCKS,
    GENERATED_TOKENS,
    INTER_TOKEN,
    KV_BLOCK_SECONDS,
    KV_BLOCKS,
    KV_CONSISTENT,
    PREEMPTIONS,
    PREFIX_HIT_TOKENS,
    PREFIX_QUERIED_TOKENS,
    PROMPT_TOKENS,
    QUEUE_TIME,
    QUEUED_PROMPT_TOKENS,
    QUEUED_REQUESTS,
    REJECTIONS,
    REPLICA_SERVES,
    REQUEST_DURATION,
    REQUESTS,
    ROUTING_DECISIONS,
    RUNNING_SEQUENCES,
    STEP_SECONDS,
    STEP_TOKENS,
    TENANT_BLOCK_SECONDS,
    TENANT_GENERATED_TOKENS,
    TENANT_PROMPT_TOKENS,
    TENANT_REQUESTS,
    TIME_TO_FIRST_TOKEN,
    WAITING_PROMPT_TOKENS,
    WAITING_SEQUENCES,
    Source,
)

from bakehouse_cluster.monitoring.grafana import Curve, Dashboard, Panel
from bakehouse_cluster.monitoring.series import UNITS, Series, shares, variables_of

Lines = tuple[tuple[Panel, ...], ...]
_of_replicas, _of_gateways = Series(Source.REPLICA), Series(Source.GATEWAY)
_REPLICAS = variables_of(REPLICA_SERVES, "Replica")
_GATEWAYS = variables_of(QUEUED_REQUESTS, "Gateway")


def _held(series: Series, by: str = "") -> Curve:
    held, all_of_them = series.level(KV_BLOCKS, by, 'state="held"'), series.level(KV_BLOCKS, by)
    return Curve(expression=f"{held} / {all_of_them}", legend=f"{{{{{by}}}}}" if by else "held")


def _hits(series: Series, by: str = "") -> Curve:
    ratio = f"{series.rate(PREFIX_HIT_TOKENS, by)} / {series.rate(PREFIX_QUERIED_TOKENS, by)}"
    return Curve(expression=ratio, legend=f"{{{{{by}}}}}" if by else "found in the cache")


def _stat(title: str, description: str, unit: str, expression: str, good_from: float | None = None) -> Panel:
    curves = (Curve(expression=expression, legend=""),)
    return Panel(title=title, description=description, unit=unit, curves=curves, kind="stat", good_from=good_from)


def _now(series: Series) -> Lines:
    return (
        (
            _stat(
                "Replicas that serve",
                REPLICA_SERVES.meaning,
                "short",
                series.level(REPLICA_SERVES),
                good_from=1,
            ),
            _stat(
                "KV consistent",
                KV_CONSISTENT.meaning,
                "short",
                f"min({series.select(KV_CONSISTENT)})",
                good_from=1,
            ),
            _stat("Ended requests now", REQUESTS.meaning, "reqps", series.rate(REQUESTS)),
            _stat(
                "Output tokens now",
                GENERATED_TOKENS.meaning,
                "suffix: tokens/s",
                series.rate(GENERATED_TOKENS),
            ),
        ),
    )


def _requests(series: Series) -> Lines:
    return (
        (
            series.rates("Ended requests by outcome", REQUESTS, by="outcome", is_stacked=True),
            series.rates("Rejections by reason", REJECTIONS, by="reason", is_stacked=True),
        ),
        (
            series.quantiles("Time to the first token", TIME_TO_FIRST_TOKEN),
            series.quantiles("Time between tokens", INTER_TOKEN),
            series.quantiles("Time to the end", REQUEST_DURATION),
        ),
    )


def _load(series: Series) -> Lines:
    return (
        (
            series.rates("Prompt tokens, computed and cached", PROMPT_TOKENS, by="source", is_stacked=True),
            series.rates("Output tokens", GENERATED_TOKENS),
        ),
        (
            series.levels("Sequences", RUNNING_SEQUENCES, WAITING_SEQUENCES, is_stacked=True),
            shares("KV blocks in use", KV_BLOCKS.meaning, _held(series, "replica")),
            shares("Prompt tokens found in the cache", PREFIX_HIT_TOKENS.meaning, _hits(series)),
        ),
    )


def overview() -> Dashboard:
    """How the cluster does, at a glance."""
    series = _of_replicas
    return Dashboard(
        key="overview",
        title="Bakehouse / Overview",
        description="Requests, latencies, tokens and load of a cluster.",
        variables=_REPLICAS,
        rows={
            "Now": _now(series),
            "Requests": _requests(series),
            "Load": _load(series),
        },
    )


def _queue(series: Series) -> Lines:
    return (
        (
            series.levels("Running sequences", RUNNING_SEQUENCES, by="replica", is_stacked=True),
            series.levels("Waiting sequences", WAITING_SEQUENCES, by="replica", is_stacked=True),
            series.levels("Prompt tokens to compute", WAITING_PROMPT_TOKENS, by="replica", is_stacked=True),
        ),
        (
            series.quantiles("Time in the queue", QUEUE_TIME),
            series.rates("Preemptions", PREEMPTIONS, by="replica", is_stacked=True),
        ),
    )


def _steps(series: Series) -> Lines:
    return (
        (
            series.means("Time of a step by part, mean", STEP_SECONDS, by="phase", is_stacked=True),
            series.quantiles("Time of a step by part", STEP_SECONDS, by="phase"),
        ),
        (
            Panel(
                title="Steps",
                description="Steps per second of each replica. None, while sequences run: it stalls.",
                unit="suffix: steps/s",
                curves=(
                    Curve(
                        expression=series.rate(STEP_SECONDS, "replica", part=2, where='phase="execute"'),
                        legend="{{replica}}",
                    ),
                ),
            ),
            shares(
                "Time in execution",
                f"Share of the time that the engine's thread spends in `execute`. {STEP_SECONDS.meaning}",
                Curve(
                    expression=series.rate(STEP_SECONDS, "replica", part=1, where='phase="execute"'),
                    legend="{{replica}}",
                ),
            ),
        ),
    )


def scheduler() -> Dashboard:
    """What the engines do with their steps."""
    series = _of_replicas
    return Dashboard(
        key="scheduler",
        title="Bakehouse / Scheduler",
        description="Queues, batches and steps of replicas.",
        variables=_REPLICAS,
        rows={
            "Queue": _queue(series),
            "Batch": (
                (
                    series.means("Batch fill, mean of steps", BATCH_FILL, by="replica"),
                    series.means("Tokens a step, mean", STEP_TOKENS, by="replica"),
                    series.quantiles("Tokens a step", STEP_TOKENS),
                ),
            ),
            "Steps": _steps(series),
        },
    )


def _blocks(series: Series) -> Lines:
    return (
        (
            series.levels("Blocks by state", KV_BLOCKS, by="state", is_stacked=True),
            shares("Blocks in use", KV_BLOCKS.meaning, _held(series, "replica")),
            Panel(
                title="Consistent",
                description=KV_CONSISTENT.meaning,
                unit="short",
                curves=(Curve(expression=series.level(KV_CONSISTENT, "replica"), legend="{{replica}}"),),
                maximum=1,
            ),
        ),
        (
            Panel(
                title="Blocks held, mean over time",
                description=KV_BLOCK_SECONDS.meaning,
                unit=UNITS["blocks"],
                curves=(
                    Curve(
                        expression=series.rate(KV_BLOCK_SECONDS, "replica", where='state="held"'),
                        legend="{{replica}}",
                    ),
                ),
                is_stacked=True,
            ),
            series.rates("Preemptions", PREEMPTIONS, by="replica", is_stacked=True),
            series.rates("Copied blocks", COPIED_BLOCKS, by="replica", is_stacked=True),
        ),
    )


def kv_cache() -> Dashboard:
    """Who holds the KV blocks, and what the prefix cache saves."""
    series = _of_replicas
    return Dashboard(
        key="kv-cache",
        title="Bakehouse / KV cache",
        description="KV blocks and cached prefixes of replicas.",
        variables=_REPLICAS,
        rows={
            "Blocks": _blocks(series),
            "Prefixes": (
                (
                    shares(
                        "Prompt tokens found in the cache", PREFIX_HIT_TOKENS.meaning, _hits(series, "replica")
                    ),
                    series.rates("Prompt tokens looked up and found", PREFIX_QUERIED_TOKENS, PREFIX_HIT_TOKENS),
                    series.rates("Prompt tokens of ended requests", PROMPT_TOKENS, by="source", is_stacked=True),
                ),
            ),
        },
    )


def _answers(series: Series) -> Lines:
    return (
        (
            series.rates("Ended requests by kind", REQUESTS, by="kind", is_stacked=True),
            series.rates("Ended requests by gateway", REQUESTS, by="replica", is_stacked=True),
            series.rates("Output tokens by gateway", GENERATED_TOKENS, by="replica", is_stacked=True),
        ),
        (
            series.quantiles("Time to the first token by kind", TIME_TO_FIRST_TOKEN, by="kind"),
            series.quantiles("Time to the end by kind", REQUEST_DURATION, by="kind"),
        ),
    )


def _tenants(series: Series) -> Lines:
    return (
        (
            series.rates("Cost by tenant", TENANT_BLOCK_SECONDS, by="tenant", is_stacked=True),
            series.rates("Prompt tokens by tenant", TENANT_PROMPT_TOKENS, by="tenant", is_stacked=True),
            series.rates("Output tokens by tenant", TENANT_GENERATED_TOKENS, by="tenant", is_stacked=True),
            series.rates("Ended requests by tenant", TENANT_REQUESTS, by="tenant", is_stacked=True),
        ),
    )


def router() -> Dashboard:
    """What gateways decide, and what clients see of it."""
    series = _of_gateways
    return Dashboard(
        key="router",
        title="Bakehouse / Router",
        description="Gateways: choices of replicas, their queues, and answers to clients.",
        variables=_GATEWAYS,
        rows={
            "Choices": (
                (
                    series.rates(
                        "Choices of a replica by reason", ROUTING_DECISIONS, by="reason", is_stacked=True
                    ),
                    series.levels("Replicas that serve", REPLICA_SERVES, by="replica", is_stacked=True),
                    series.levels("Running sequences by replica", RUNNING_SEQUENCES, by="replica"),
                ),
            ),
            "Queue": (
                (
                    series.levels("Requests that wait", QUEUED_REQUESTS, by="replica", is_stacked=True),
                    series.levels("Their prompt tokens", QUEUED_PROMPT_TOKENS, by="replica", is_stacked=True),
                    series.rates("Rejections by reason", REJECTIONS, by="reason", is_stacked=True),
                ),
            ),
            "Answers": _answers(series),
            "Tenants": _tenants(series),
        },
    )


def dashboards() -> tuple[Dashboard, ...]:
    """All of them."""
    return overview(), scheduler(), kv_cache(), router()
