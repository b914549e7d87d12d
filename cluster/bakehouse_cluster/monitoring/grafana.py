"""Dashboards as Grafana reads them: panels in rows, with variables that choose what is shown."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

# Grafana 10's; later ones bring what they read up to their own.
SCHEMA_VERSION = 39
WIDTH = 24
HEIGHTS = {"timeseries": 8, "stat": 4}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """An expression, and what its series are called: `{{label}}` stands for a label's value."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What it shows, in which of Grafana's units, and what that means; less than `good_from` is shown in red."""

    title: str
    description: str
    unit: str
    curves: tuple[Curve, ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    is_stacked: bool = False
    good_from: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Chooses values of a label: all, or some, of the series that `of` selects."""

    name: str
    title: str
    of: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """Rows of panels that share the width evenly; `key` names file and address."""

    key: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: Mapping[str, tuple[tuple[Panel, ...], ...]]


def as_json(dashboard: Dashboard) -> str:
    """The file that Grafana imports."""
    model = {
        "uid": f"bakehouse-{dashboard.key}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["bakehouse"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [_LINKS],
        "templating": {"list": [_DATASOURCE_VARIABLE, *map(_variable, dashboard.variables)]},
        "panels": _panels(dashboard.rows),
    }
    return json.dumps(model, indent=1, ensure_ascii=False) + "\n"


_DATASOURCE_VARIABLE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
_LINKS = {
    "title": "Bakehouse",
    "type": "dashboards",
    "tags": ["bakehouse"],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
}


def _variable(variable: Variable) -> dict[str, object]:
    query = f"label_values({variable.of}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.title,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,  # whenever the time range changes, as replicas come and go
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",  # also where a label is missing, as that of a Kubernetes cluster is on a laptop
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels(rows: Mapping[str, tuple[tuple[Panel, ...], ...]]) -> list[dict[str, object]]:
    shown: list[dict[str, object]] = []
    y = 0
    for title, lines in rows.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        shown.append(
            {
                "id": len(shown) + 1,
                "type": "row",
                "title": title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        y += 1
        for line in lines:
            width, height = WIDTH // len(line), max(HEIGHTS[panel.kind] for panel in line)
            for column, panel in enumerate(line):
                place = {"x": column * width, "y": y, "w": width, "h": height}
                shown.append({"id": len(shown) + 1, "gridPos": place} | _panel(panel))
            y += height
    return shown


def _panel(panel: Panel) -> dict[str, object]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": list(_targets(panel.curves)),
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _targets(curves: Iterable[Curve]) -> Iterable[dict[str, object]]:
    for letter, curve in zip("ABCDEFGH", curves, strict=False):
        yield {
            "refId": letter,
            "datasource": DATASOURCE,
            "expr": curve.expression,
            "legendFormat": curve.legend,
            "editorMode": "code",
            "range": True,
        }


def _defaults(panel: Panel) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if panel.good_from is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.good_from}]
    defaults: dict[str, object] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 25 if panel.is_stacked else 5,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
        }
    return defaults


_OPTIONS: dict[str, dict[str, object]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
}
