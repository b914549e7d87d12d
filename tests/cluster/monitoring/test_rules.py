"""promtool computes what the alerts say of a cluster, healthy but for one thing."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from bakehouse_cluster.monitoring.rules import rules
from bakehouse_replica.core.metric_table import METRICS

GROUPS = yaml.safe_load(rules())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
# Of Ray and Prometheus themselves.
FOREIGN = {
    "ray_serve_autoscaling_target_replicas",
    "ray_serve_deployment_replica_starts_total",
    "ray_serve_deployment_status",
}
OF = 'ray_io_cluster="demo", application="bakehouse"'
GATEWAY = f'{OF}, deployment="Gateway", replica="g1"'
REPLICA = f'{OF}, deployment="Replica", replica="r1"'
OTHER = f'{OF}, deployment="Replica", replica="r2"'
FIRST, GAP = "ray_bakehouse_time_to_first_token_seconds_bucket", "ray_bakehouse_inter_token_seconds_bucket"
REQUESTS, REJECTIONS = "ray_bakehouse_requests_total", "ray_bakehouse_rejections_total"
MINUTES = 60  # of samples, one each


def always(value: float) -> str:
    return f"{value}x{MINUTES}"


def growing(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


# Two replicas and a gateway: 600 requests a minute, each of two steps.
HEALTHY: dict[str, str | None] = {
    'up{ray_io_cluster="demo", instance="a:8080"}': always(1),
    'up{ray_io_cluster="other", instance="b:8080"}': always(0),
    f'ray_serve_autoscaling_target_replicas{{{OF}, deployment="Gateway", WorkerId="c"}}': always(1),
    f'ray_serve_autoscaling_target_replicas{{{OF}, deployment="Replica", WorkerId="c"}}': always(2),
    f'ray_serve_deployment_status{{{OF}, deployment="Gateway"}}': always(6),
    f'ray_serve_deployment_status{{{OF}, deployment="Replica"}}': always(6),
    f"ray_serve_deployment_replica_starts_total{{{GATEWAY}}}": always(1),
    f"ray_serve_deployment_replica_starts_total{{{REPLICA}}}": always(1),
    f"ray_serve_deployment_replica_starts_total{{{OTHER}}}": always(1),
    f"ray_bakehouse_queued_requests{{{GATEWAY}}}": always(1),
    f'{REQUESTS}{{{GATEWAY}, kind="chat", outcome="complete"}}': growing(600),
    f'{REQUESTS}{{{GATEWAY}, kind="chat", outcome="invalid_request"}}': growing(60),
    f'{REQUESTS}{{{GATEWAY}, kind="chat", outcome="internal_error"}}': growing(0),
    f'{REJECTIONS}{{{GATEWAY}, reason="invalid_api_key"}}': growing(60),
    f'{REJECTIONS}{{{GATEWAY}, reason="overloaded"}}': growing(0),
    **{f'{FIRST}{{{GATEWAY}, kind="chat", le="{le}"}}': growing(600) for le in ("1.0", "10.0", "30.0", "+Inf")},
    **{f'{GAP}{{{GATEWAY}, le="{le}"}}': growing(6000) for le in ("0.1", "0.5", "1.0", "+Inf")},
    **{
        f"ray_bakehouse_{name}{{{process}}}": value
        for process in (REPLICA, OTHER)
        for name, value in {
            "replica_serves": always(1),
            "kv_consistent": always(1),
            "running_sequences": always(8),
            "waiting_sequences": always(2),
            "preemptions_total": growing(3),
            "queue_time_seconds_count": growing(300),
        }.items()
    },
    **{
        f'ray_bakehouse_step_seconds_count{{{process}, phase="execute"}}': growing(1200)
        for process in (REPLICA, OTHER)
    },
    **{
        f'ray_bakehouse_kv_blocks{{{process}, state="{state}"}}': always(value)
        for process in (REPLICA, OTHER)
        for state, value in {"free": 10, "cached": 40, "held": 50}.items()
    },
}


def one(name: str, process: str = REPLICA) -> str:
    return f"ray_bakehouse_{name}{{{process}}}"


def blocks(free: int, cached: int, held: int) -> Mapping[str, str | None]:
    states = {"free": free, "cached": cached, "held": held}
    return {
        f'ray_bakehouse_kv_blocks{{{REPLICA}, state="{state}"}}': always(value) for state, value in states.items()
    }


def restarts(n: int) -> Mapping[str, str | None]:
    """So many further processes have started, one a minute, and are gone."""
    series = "ray_serve_deployment_replica_starts_total"
    return {
        f'{series}{{{OF}, deployment="Replica", replica="d{i}"}}': f"{'_ ' * (30 + i)}1 1 stale" for i in range(n)
    }


NOTHING_HEARD: Mapping[str, str | None] = {series: None for series in HEALTHY if not series.startswith("up")}
NO_REPLICAS: Mapping[str, str | None] = {
    series: None for series in HEALTHY if series.startswith("ray_bakehouse") and 'deployment="Replica"' in series
}
NO_GATEWAY: Mapping[str, str | None] = {
    series: None for series in HEALTHY if series.startswith("ray_bakehouse") and 'deployment="Gateway"' in series
}
FAILING = f'{REQUESTS}{{{GATEWAY}, kind="chat", outcome="internal_error"}}'
REFUSED = f'{REJECTIONS}{{{GATEWAY}, reason="overloaded"}}'
STEPS = f'ray_bakehouse_step_seconds_count{{{REPLICA}, phase="execute"}}'
STATUS = f'ray_serve_deployment_status{{{OF}, deployment="Replica"}}'
WANTED = 'ray_serve_autoscaling_target_replicas{%s, deployment="%s", WorkerId="c"}'


@dataclass(frozen=True, slots=True)
class Case:
    """What differs from the healthy cluster (`None`: not there), and which alerts fire for it at a minute."""

    about: str
    what: str
    changes: Mapping[str, str | None] = field(default_factory=dict)
    fires: tuple[str, ...] = ()
    at: str = "45m"


def fires(alert: str, what: str, changes: Mapping[str, str | None], *others: str) -> Case:
    return Case(alert, what, changes, (alert, *others))


def silent(alert: str, what: str, changes: Mapping[str, str | None], *others: str) -> Case:
    return Case(alert, what, changes, others)


def late(per_minute: float) -> str:
    """Nothing for half an hour, then that many a minute."""
    return f"0x30 0+{per_minute}x30"


NONE_SERVES: Mapping[str, str | None] = {one("replica_serves", process): always(0) for process in (REPLICA, OTHER)}
CASES = [
    fires("BakehouseNoReplicaServes", "all say so", NONE_SERVES, "BakehouseReplicasMissing"),
    fires("BakehouseNoReplicaServes", "none says anything", NO_REPLICAS),
    silent("BakehouseNoReplicaServes", "one of two serves", {one("replica_serves"): "1x40 0x20"}),
    fires("BakehouseGatewayDown", "the only one is gone", NO_GATEWAY),
    fires("BakehouseGatewayDown", "one of two is gone", {WANTED % (OF, "Gateway"): always(2)}),
    fires("BakehouseGatewayDown", "nothing is heard of any", NOTHING_HEARD),
    silent(
        "BakehouseGatewayDown", "a second one has just been asked for", {WANTED % (OF, "Gateway"): "1x42 2x20"}
    ),
    fires("BakehouseReplicasMissing", "one of two does not serve", {one("replica_serves"): always(0)}),
    silent(
        "BakehouseReplicasMissing", "a third has been wanted for 10 min", {WANTED % (OF, "Replica"): "2x34 3x30"}
    ),
    fires("BakehouseReplicaRestarts", "five in a quarter of an hour", restarts(5)),
    silent("BakehouseReplicaRestarts", "both are replaced once, by an update", restarts(2)),
    fires("BakehouseDeployFailed", "UNHEALTHY", {STATUS: always(2)}),
    silent("BakehouseDeployFailed", "UPDATING", {STATUS: always(3)}),
    silent("BakehouseDeployFailed", "unknown", {STATUS: always(0)}),
    fires("BakehouseTargetDown", "of its Ray", {'up{ray_io_cluster="demo", instance="a:8080"}': always(0)}),
    silent("BakehouseTargetDown", "of another Ray", {'up{ray_io_cluster="other", instance="c:8080"}': always(0)}),
    fires("BakehouseKvInconsistent", "on one of two", {one("kv_consistent"): "1x44 0x10"}),
    silent("BakehouseKvInconsistent", "it was on one that is gone", {one("kv_consistent"): "1x20 0x5 stale"}),
    fires("BakehouseStepsStall", "sequences, no steps", {STEPS: "0+1200x30 36000x30"}),
    silent(
        "BakehouseStepsStall",
        "nothing to do, no steps",
        {STEPS: "0+1200x30 36000x30", one("running_sequences"): "8x29 0x30", one("waiting_sequences"): always(0)},
    ),
    silent(
        "BakehouseStepsStall",
        "a sequence now and then, no steps seen",
        {
            STEPS: "0+1200x30 36000x30",
            one("running_sequences"): "8x29" + " 0 8" * 15 + " 0",
            one("waiting_sequences"): always(0),
        },
    ),
    fires("BakehouseErrors", "one in fifty", {FAILING: growing(14)}),
    silent("BakehouseErrors", "one in two hundred", {FAILING: growing(3)}),
    fires("BakehouseRejects", "one in fifty", {REFUSED: growing(15)}),
    silent("BakehouseRejects", "one in two hundred", {REFUSED: growing(3)}),
    fires("BakehouseQueueLong", "more wait than run", {one("waiting_sequences"): "2x30 20x30"}),
    silent("BakehouseQueueLong", "for five minutes so far", {one("waiting_sequences"): "2x40 20x20"}),
    fires(
        "BakehouseFirstTokenSlow",
        "one in fifty takes 10 to 30 s",
        {f'{FIRST}{{{GATEWAY}, kind="chat", le="{le}"}}': growing(588) for le in ("1.0", "10.0")},
    ),
    silent(
        "BakehouseFirstTokenSlow",
        "one in two hundred does",
        {f'{FIRST}{{{GATEWAY}, kind="chat", le="{le}"}}': growing(597) for le in ("1.0", "10.0")},
    ),
    fires(
        "BakehouseTokensSlow",
        "one in ten",
        {f'{GAP}{{{GATEWAY}, le="{le}"}}': growing(5400) for le in ("0.1", "0.5")},
    ),
    silent(
        "BakehouseTokensSlow",
        "one in thirty",
        {f'{GAP}{{{GATEWAY}, le="{le}"}}': growing(5800) for le in ("0.1", "0.5")},
    ),
    fires("BakehousePreemptionStorm", "two for three admissions", {one("preemptions_total"): growing(200)}),
    silent("BakehousePreemptionStorm", "for five minutes so far", {one("preemptions_total"): "0x40 0+200x20"}),
    fires("BakehouseKvNearlyFull", "held by live sequences", blocks(free=1, cached=1, held=98)),
    silent("BakehouseKvNearlyFull", "full of cached prefixes", blocks(free=0, cached=60, held=40)),
]


@pytest.fixture(scope="module")
def rules_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(rules())
    return path


def promtool(rules_file: Path, case: Case, test: Mapping[str, object]) -> str:
    """What promtool says of a test, nothing where it holds."""
    series = {name: values for name, values in (HEALTHY | dict(case.changes)).items() if values is not None}
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    document = {
        "rule_files": [str(rules_file)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, **test}],
    }
    path = rules_file.parent / "test.yaml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize(
    "case",
    [Case("", "healthy"), *CASES],
    ids=lambda case: f"{case.about}: {case.what}" if case.about else case.what,
)
def test_exactly_the_alerts_fire_that_should(rules_file: Path, case: Case) -> None:
    firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(case.fires)]
    test = {"promql_expr_test": [{"expr": firing, "eval_time": case.at, "exp_samples": expected}]}
    assert not promtool(rules_file, case, test)


def test_each_alert_has_a_case_in_which_it_fires_and_a_near_one_in_which_it_does_not() -> None:
    assert {case.about for case in CASES if case.about in case.fires} == set(ALERTS)
    assert {case.about for case in CASES if case.about not in case.fires} == set(ALERTS)


def test_an_alert_says_in_words_what_is_wrong_and_where(rules_file: Path) -> None:
    case = next(case for case in CASES if case.about == "BakehouseKvNearlyFull" and case.fires)
    rule = ALERTS[case.about]
    labels = {"severity": "warning", "ray_io_cluster": "demo", "application": "bakehouse", "replica": "r1"}
    expected = {
        "exp_labels": labels,
        "exp_annotations": {
            "summary": "Live sequences hold 98% of the KV cache of replica r1",
            "description": rule["annotations"]["description"],
            "runbook": rule["annotations"]["runbook"],
        },
    }
    test = {"alert_rule_test": [{"eval_time": case.at, "alertname": case.about, "exp_alerts": [expected]}]}
    assert not promtool(rules_file, case, test)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_severity_a_text_and_an_entry_in_the_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/runbook.md#{alert.lower()}"


def test_every_metric_in_a_rule_is_one_of_the_table_or_of_rays() -> None:
    known = {f"ray_{name}" for metric in METRICS for name in metric.series_names} | FOREIGN
    named = {
        name
        for group in GROUPS
        for rule in group["rules"]
        for name in re.findall(r"\bray_(?!io_)\w+", rule["expr"])
    }
    assert named <= known


def test_every_recorded_series_that_an_alert_reads_is_recorded() -> None:
    recorded = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
    read = {name for rule in ALERTS.values() for name in re.findall(r"bakehouse:\w+:\w+", rule["expr"])}
    assert read <= recorded


def test_the_documentation_lists_every_alert_with_its_severity_and_how_long_it_waits() -> None:
    page = (Path(__file__).parents[3] / "docs" / "dashboards.md").read_text()
    rows = re.findall(r"^\| (Bakehouse\w+) \| (\w+) \| .* \| ([\w ]+) \|$", page, re.MULTILINE)
    wanted = {(name, rule["labels"]["severity"], rule.get("for", "at once")) for name, rule in ALERTS.items()}
    assert set(rows) == wanted
