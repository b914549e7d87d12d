"""Of random configurations the chart makes the command line's document, and refuses what the command line refuses.

They are rendered in one go, by a chart of the chart's own templates, with the chart's own schema for each of them.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from subprocess import CompletedProcess
from typing import Any

import pytest
from bakehouse_cluster import plain_yaml
from bakehouse_cluster.config import parse_config
from bakehouse_cluster.config_schema import config_schema
from bakehouse_cluster.serve_config import serve_config
from bakehouse_replica.core.errors import ConfigError
from charts import CHART, Helm

N_CONFIGS = 200
TEXTS = [
    "smollm2", "1e6", "1e-7", "010", "0x1F", "1_000", "1:30", "2024-01-01", "null", "~", "true", "on", "No", ".5",
    "", " ", "a: b", "# no comment", "'", '"', "a\nb\n", "\n  indented\n", "{{ .Release.Name }}", "{%- x -%}\t",
    "Brötchen 🥐", "\u202e\u2028", "\x07\x1b[31m", "&a *b !c", "a" * 300, "|", ">", "@", "`", "%", "- x", "? x",
    "<<", "=", "-",
]  # fmt: skip
NUMBERS = [1, 2, 7, 1024, 65535, 1_000_000, 123_456_789, 2**53 - 1, 0.1, 0.25, 1.5, 1e-7, 45.5, 1e6, 1e9]
WRONG = [None, True, 0, -1, 1.5, "1e6", "on", "", [], {}, [None], ["a b"], 2**53, 1e300, "x y", {"x": 1}]
# Texts of the patterns of the schema.
SIZES = ["512MiB", "1.5 GiB", "2GB", "1024", ".5kb", "81234567b"]
POOLS = ["cpu", "gpu", "A-b_c.9"]
ENDPOINTS = ["http://collector:4317", "https://a.b/c?d=e#f"]
# `rendered` is what the command line printed, read as Kubernetes reads it.
DOCUMENTS = """\
{{- range .Values.cases }}
{{ include "bakehouse.serveConfig" (dict "Values" (dict "config" .config)) | fromYaml | toJson }}
{{ fromYaml .rendered | toJson }}
{{- end }}
"""
SCHEMA = config_schema()
Tree = dict[str, Any]


def some(schema: Mapping[str, Any], random: Random) -> object:
    """Something of this schema."""
    if schema.get("anyOf"):
        return some({"anyOf": None} | random.choice(schema["anyOf"]) | _bounds(schema), random)
    if "enum" in schema:
        return random.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    match schema["type"]:
        case "object":
            required = schema.get("required", ())
            return {
                name: some(part, random)
                for name, part in schema["properties"].items()
                if name in required or random.random() < 0.5
            }
        case "array":
            return [some(schema["items"], random) for _ in range(random.randrange(3))]
        case "boolean":
            return random.random() < 0.5
        case "null":
            return None
        case "string":
            return random.choice(_texts(str(schema.get("pattern", "")), int(schema.get("minLength", 0))))
        case kind:
            return random.choice([number for number in NUMBERS if _fits(number, kind, schema)])


def _bounds(schema: Mapping[str, Any]) -> Tree:
    """What it says of all its alternatives."""
    return {key: value for key, value in schema.items() if key in ("minimum", "maximum", "exclusiveMinimum")}


def _texts(pattern: str, min_length: int) -> list[str]:
    if pattern:
        return [text for text in (*SIZES, *POOLS, *ENDPOINTS) if re.search(pattern, text)]
    return [text for text in TEXTS if len(text) >= min_length]


def _fits(number: float, kind: str, schema: Mapping[str, Any]) -> bool:
    """With integers that are written as floats among them, as helm takes all of its numbers for floats."""
    return (
        (kind == "number" or number == int(number))
        and schema.get("minimum", number) <= number <= schema.get("maximum", number)
        and number > schema.get("exclusiveMinimum", 0)
    )


def consistent(tree: Tree) -> Tree:
    """Without what no schema can say: what its keys say against each other, and how much a size in words is."""
    autoscale = tree.get("replica", {}).get("autoscale")
    if autoscale:
        tree.get("server", {}).pop("replicas", None)
        autoscale["max_replicas"] = max(autoscale["min_replicas"], autoscale["max_replicas"])
    tracing = tree.get("tracing", {})
    if tracing.get("exporter") != "otlp":
        tracing.pop("endpoint", None)
    server = tree.get("server", {})
    if isinstance(server.get("object_store"), str):  # how much a text says, no schema knows
        server["object_store"] = "512MiB"
    return tree


def random_config(random: Random) -> Tree:
    tree = some(SCHEMA, random)
    assert isinstance(tree, dict)
    return consistent(tree)


def spoilt(tree: Tree, random: Random) -> Tree:
    """With something else in place of one value, which may be right."""
    section = random.choice(list(tree.values()) or [tree])
    section[random.choice([*section, "unknown"])] = random.choice(WRONG)
    return consistent(tree) if isinstance(tree.get("replica", {}).get("autoscale", {}), dict) else tree


@pytest.fixture(scope="module")
def of_many(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """A chart whose notes are the documents of each of `cases`, two lines of JSON."""
    folder = tmp_path_factory.mktemp("chart")
    (folder / "templates").mkdir()
    for name in ("_names.tpl", "_serve_config.tpl"):
        shutil.copy(CHART / "templates" / name, folder / "templates" / name)
    (folder / "templates" / "NOTES.txt").write_text(DOCUMENTS)
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: many, version: 0.1.0}\n")
    case = {"type": "object", "properties": {"config": SCHEMA}}
    schema = {"type": "object", "properties": {"cases": {"type": "array", "items": case}}}
    (folder / "values.schema.json").write_text(json.dumps(schema))
    return replace(helm, chart=folder, rendered={})


def rendered(helm: Helm, folder: Path, cases: list[Tree]) -> CompletedProcess[str]:
    path = folder / "values.json"
    path.write_text(json.dumps({"cases": cases}, ensure_ascii=False))  # YAML knows no surrogates
    return helm.run("install", "demo", str(helm.chart), "--dry-run=client", "-f", str(path))


def test_chart_and_command_make_the_same_documents_of_random_configurations(of_many: Helm, tmp_path: Path) -> None:
    random = Random(0)
    trees = [random_config(random) for _ in range(N_CONFIGS)]
    documents = [serve_config(tree, "kubernetes") for tree in trees]
    cases = [
        {"config": tree, "rendered": plain_yaml.dump(document)}
        for tree, document in zip(trees, documents, strict=True)
    ]
    done = rendered(of_many, tmp_path, cases)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.partition("NOTES:\n")[2].splitlines() if line]
    for tree, document, of_chart, of_command in zip(trees, documents, lines[::2], lines[1::2], strict=True):
        assert of_command == document, tree
        assert without_nothing(of_chart) == without_nothing(document), tree


def test_chart_and_command_refuse_the_same_values(of_many: Helm, tmp_path: Path) -> None:
    random = Random(1)
    trees = [spoilt(random_config(random), random) for _ in range(N_CONFIGS)]
    done = rendered(of_many, tmp_path, [{"config": tree, "rendered": ""} for tree in trees])
    refused = {int(index) for index in re.findall(r"/cases/([0-9]+)", done.stderr)}
    for index, tree in enumerate(trees):
        assert (index in refused) == _is_refused(tree), tree
    assert N_CONFIGS // 4 < len(refused) < N_CONFIGS


def _is_refused(tree: Tree) -> bool:
    try:
        parse_config(tree)
    except ConfigError:
        return True
    return False


def without_nothing(tree: object) -> object:
    """A key that is null is a key that is not there, to helm as to the configuration."""
    if isinstance(tree, dict):
        return {key: without_nothing(value) for key, value in tree.items() if value is not None}
    return [without_nothing(item) for item in tree] if isinstance(tree, list) else tree
