"""The runbook and the guide to upgrades name what there is: alerts, metrics, keys, values, options."""

import re
from collections.abc import Iterator
from typing import get_args

import pytest
import yaml
from bakehouse_cluster.cli import app
from bakehouse_cluster.config import Config
from bakehouse_replica.core.metric_table import METRICS
from documents import ROOT, anchors, code, commands, page
from pydantic import BaseModel
from typer.core import TyperGroup
from typer.main import get_command

RUNBOOK, UPGRADES = "docs/runbook.md", "docs/upgrades.md"
PAGES = (RUNBOOK, UPGRADES)
ALERTS = {
    rule["alert"]: rule["annotations"]["runbook"]
    for group in yaml.safe_load(page("helm/files/rules.yaml"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
METRIC = re.compile(r"(?<!\w)(?:ray_)?(bakehouse_(?!router|cluster|replica\b|kernels)\w+)(?:\{(\w+)=\"(\w+)\"\})?")
SECTION = "|".join(Config.model_fields)
CONFIG_KEY = re.compile(rf"^(?:config\.)?((?:{SECTION})\.[a-z_.]+)")
EVERY_PAGE = [
    str(file.relative_to(ROOT)) for folder in (".", "[!.]*") for file in sorted(ROOT.glob(f"{folder}/*.md"))
]
COMMANDED = [path for path in EVERY_PAGE if commands(page(path), "bakehouse")]
VALUES = yaml.safe_load(page("helm/values.yaml"))
VALUE = re.compile(rf"^((?:{'|'.join(VALUES)})\.[A-Za-z.]+)$")


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_leads_to_a_section_of_the_runbook_that_the_table_of_contents_has(alert: str) -> None:
    path, _, anchor = ALERTS[alert].partition("#")
    text = page(path)
    assert anchor in anchors(text)
    assert f"](#{anchor})" in text.partition("## Where to look")[0]


def test_every_failure_is_in_the_table_of_contents() -> None:
    contents = page(RUNBOOK).partition("## Where to look")[0]
    assert anchors(page(RUNBOOK)) - {"runbook", "where-to-look"} == set(re.findall(r"\]\(#([^)]+)\)", contents))


@pytest.mark.parametrize("path", PAGES)
def test_no_section_is_longer_than_a_screen(path: str) -> None:
    sections = re.split(r"^## ", page(path), flags=re.MULTILINE)[1:]
    assert not {part.splitlines()[0]: n for part in sections if (n := len(part.splitlines())) > 48}


def test_every_metric_and_label_that_is_named_is_in_the_table() -> None:
    known = {name: metric for metric in METRICS for name in (metric.name, *metric.series_names)}
    named = METRIC.findall("\n".join(code(page(RUNBOOK))))
    assert len(named) > 20
    for name, label, value in named:
        assert name in known, name
        labels = {one.name: one.values for one in known[name].labels}
        assert not label or value in labels.get(label, ()), (name, label, value)


@pytest.mark.parametrize("path", PAGES)
def test_every_key_of_the_configuration_that_is_named_exists(path: str) -> None:
    named = [match[1] for text in code(page(path)) if (match := CONFIG_KEY.match(text))]
    assert named
    assert not set(named) - set(_keys(Config))


@pytest.mark.parametrize("path", PAGES)
def test_every_value_of_the_chart_that_is_named_exists(path: str) -> None:
    named = [match[1] for text in code(page(path)) if (match := VALUE.match(text))]
    named = [name for name in named if not name.startswith("config.")]
    assert named
    assert not [name for name in named if not _has(VALUES, name)]


@pytest.mark.parametrize("path", COMMANDED)
def test_every_option_of_the_command_line_that_is_named_is_known(path: str) -> None:
    for words in commands(page(path), "bakehouse"):
        command, rest = get_command(app), words[1:]
        while isinstance(command, TyperGroup) and rest and rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        asked = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert not asked - known, words
        assert not isinstance(command, TyperGroup) or not rest or asked, words


def _keys(model: type[BaseModel]) -> Iterator[str]:
    """The dotted paths of sections and keys."""
    for name, field in model.model_fields.items():
        yield name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from (f"{name}.{key}" for key in _keys(part))


def _has(tree: object, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True
