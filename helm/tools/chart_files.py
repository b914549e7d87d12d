"""Writes what of the chart is made from something else.

    python helm/tools/chart_files.py

values.schema.json: values.schema.yaml beside this file, with the configuration's own schema as `config`.
files/environment.yaml: what a cluster's pods need, with HAProxy in front of the gateways and without.
files/rules.yaml and files/dashboards: the alerts and dashboards that `bakehouse monitor` has too.
README.md's table: the lines `# --` in values.yaml, each of which tells of the key below it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from bakehouse_cluster.config_schema import config_schema
from bakehouse_cluster.monitoring.dashboards import dashboards
from bakehouse_cluster.monitoring.grafana import as_json
from bakehouse_cluster.monitoring.rules import rules
from bakehouse_cluster.serve_environment import cluster_environment

CHART = Path(__file__).parents[1]
SCHEMA = CHART / "values.schema.json"
README = CHART / "README.md"
ENVIRONMENT = CHART / "files" / "environment.yaml"
RULES = CHART / "files" / "rules.yaml"
DASHBOARDS = CHART / "files" / "dashboards"
_BEGIN, _END = "<!-- values: made by tools/chart_files.py -->\n", "<!-- end of values -->"
EMPTY: tuple[object, ...] = (None, "", [], {})
_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z]+):")


def values_schema() -> str:
    """values.schema.json, whose `config` is what the configuration file may hold."""
    schema = yaml.safe_load((CHART / "tools" / "values.schema.yaml").read_text())
    schema["properties"]["config"] = config_schema()
    _require_defaults(schema, yaml.safe_load((CHART / "values.yaml").read_text()))
    return json.dumps(schema, indent=1) + "\n"


def _require_defaults(schema: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """What has a default that is not empty must not be taken away: helm takes a null for that."""
    if schema.get("additionalProperties") is not False:
        return
    schema["required"] = [key for key, value in defaults.items() if key == "config" or value not in EMPTY]
    for key, default in defaults.items():
        if isinstance(default, dict) and key != "config":
            _require_defaults(schema["properties"][key], default)


def environment() -> str:
    """files/environment.yaml: name → text, by who stands in front of the gateways."""
    return yaml.safe_dump(
        {"haproxy": cluster_environment(haproxy=True), "proxy": cluster_environment(haproxy=False)}
    )


def dashboard_files() -> dict[Path, str]:
    """The content of each file in files/dashboards."""
    return {DASHBOARDS / f"{dashboard.key}.json": as_json(dashboard) for dashboard in dashboards()}


def values_table() -> str:
    """A row for each key of values.yaml that has a line `# --`."""
    rows = ["| value | default | |", "|---|---|---|"]
    for path, text in descriptions().items():
        default = json.dumps(default_of(path), ensure_ascii=False)
        shown = f"`{default}`" if len(default) <= 60 else "see [values.yaml](values.yaml)"
        rows.append(f"| `{path}` | {shown} | {text} |")
    return "\n".join(rows) + "\n"


def descriptions() -> dict[str, str]:
    """Dotted path → what its line `# --` says."""
    found: dict[str, str] = {}
    path: list[str] = []
    text = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        if line.strip().startswith("# -- "):
            text = line.strip().removeprefix("# -- ")
        elif match := _KEY.match(line):
            path = [*path[: len(match["indent"]) // 2], match["key"]]
            if text:
                found[".".join(path)] = text
            text = ""
    return found


def default_of(path: str) -> object:
    """What values.yaml has at a dotted path."""
    value: object = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in path.split("."):
        assert isinstance(value, dict), "a path leads through mappings"
        value = value[key]
    return value


def readme() -> str:
    """README.md with the table as it should be."""
    before, rest = README.read_text().split(_BEGIN)
    return before + _BEGIN + values_table() + _END + rest.split(_END, 1)[1]


def main() -> None:
    """Write all of them."""
    SCHEMA.write_text(values_schema())
    ENVIRONMENT.write_text(environment())
    RULES.write_text(rules())
    for path, text in dashboard_files().items():
        path.write_text(text)
    README.write_text(readme())


if __name__ == "__main__":
    main()
