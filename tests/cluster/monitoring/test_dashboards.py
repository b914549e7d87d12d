"""The dashboards draw the table of metrics: all of it, and nothing else."""

import json
import re

import pytest
from bakehouse_cluster.monitoring.dashboards import dashboards
from bakehouse_cluster.monitoring.grafana import WIDTH, Dashboard, Panel, as_json
from bakehouse_replica.core.metric_table import METRICS, Source

ALL = dashboards()
NAME = re.compile(r"\bray_(?!io_)\w+")


def panels(dashboard: Dashboard) -> list[Panel]:
    return [panel for lines in dashboard.rows.values() for line in lines for panel in line]


def names_in(text: str) -> set[str]:
    return set(NAME.findall(text))


def drawn() -> set[str]:
    return {
        name
        for dashboard in ALL
        for panel in panels(dashboard)
        for curve in panel.curves
        for name in names_in(curve.expression)
    }


def test_every_metric_of_the_table_is_drawn_somewhere() -> None:
    missing = [metric.name for metric in METRICS if not drawn() & {f"ray_{name}" for name in metric.series_names}]
    assert not missing


def test_every_name_is_one_of_the_table() -> None:
    known = {f"ray_{name}" for metric in METRICS for name in metric.series_names}
    of_variables = {
        name for dashboard in ALL for variable in dashboard.variables for name in names_in(variable.of)
    }
    assert drawn() | of_variables <= known


@pytest.mark.parametrize("dashboard", ALL, ids=lambda dashboard: dashboard.key)
def test_every_panel_says_what_it_shows_in_which_unit(dashboard: Dashboard) -> None:
    for panel in panels(dashboard):
        assert panel.title
        assert panel.unit
        assert panel.description
        assert panel.curves
    titles = [panel.title for panel in panels(dashboard)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("dashboard", ALL, ids=lambda dashboard: dashboard.key)
def test_variables_choose_application_deployment_and_process(dashboard: Dashboard) -> None:
    names = [variable.name for variable in dashboard.variables]
    assert names == ["cluster", "application", "deployment", "replica"]
    text = "".join(curve.expression for panel in panels(dashboard) for curve in panel.curves)
    assert all(f'=~"${name}"' in text for name in names)


def test_a_choice_of_replicas_leaves_the_gateways_of_the_application_in_view() -> None:
    deployments = {Source.REPLICA: "$replica", Source.GATEWAY: ""}
    sources = {f"ray_{name}": metric.source for metric in METRICS for name in metric.series_names}
    (overview,) = [dashboard for dashboard in ALL if dashboard.key == "overview"]
    for panel in panels(overview):
        for curve in panel.curves:
            for name, labels in re.findall(r"(ray_\w+)\{([^}]*)\}", curve.expression):
                assert ("$replica" in labels) == bool(deployments[sources[name]]), name


@pytest.mark.parametrize("dashboard", ALL, ids=lambda dashboard: dashboard.key)
def test_panels_fill_their_rows_and_do_not_overlap(dashboard: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    shown = json.loads(as_json(dashboard))["panels"]
    for panel in shown:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells
    assert len(taken) == WIDTH * (1 + max(y for _, y in taken))
    assert len({panel["id"] for panel in shown}) == len(shown)
