"""Bad values are refused in one line that begins with the path of the value to change."""

import json
import re

import pytest
from bakehouse_cluster.serve_config import serve_config
from bakehouse_replica.core.errors import ConfigError
from charts import CHART, Helm, values
from refused_values import CONTRADICTIONS, WRONG_VALUES, Refused

FAIL = re.compile(r'fail \(?(?:printf )?"([^"%]*)')


@pytest.mark.parametrize("refused", CONTRADICTIONS, ids=str)
def test_a_contradiction_is_one_error_that_begins_with_the_values_path(helm: Helm, refused: Refused) -> None:
    stderr = helm.refusal(refused.example, *refused.sets)
    message = re.search(r"execution error at \(.*?\): (.*)", stderr)
    assert message is not None, stderr
    assert message[1].startswith(refused.message)


def test_a_name_of_48_characters_is_refused_and_one_of_47_is_not(helm: Helm) -> None:
    name = "a" * (47 - len("-bakehouse"))
    assert helm.objects("minimal-cpu", name=name)
    assert "nameOverride: the RayService would be called" in helm.refusal("minimal-cpu", name=name + "a")


def test_every_message_of_the_templates_is_seen_here() -> None:
    said = {text for path in CHART.glob("templates/*") for text in FAIL.findall(path.read_text())}
    path_of = re.compile(r"^[\w.]*")
    seen = [refused.message for refused in CONTRADICTIONS]
    unseen = {text for text in said if not any(message.startswith(path_of.findall(text)[0]) for message in seen)}
    assert said
    assert not unseen


@pytest.mark.parametrize("refused", WRONG_VALUES, ids=str)
def test_the_schema_refuses_a_wrong_value_by_its_path(each_helm: Helm, refused: Refused) -> None:
    every = [change for one in WRONG_VALUES for change in one.sets]  # all at once: it names all that is wrong
    stderr = each_helm.refusal(refused.example, *every).replace("/", ".")
    assert "the schema(s)" in stderr
    parts = refused.message.split()
    assert any(all(part in line for part in parts) for line in stderr.splitlines())


@pytest.mark.parametrize(
    "tree",
    [
        {"replica": {"max_step_token": 512}},
        {"models": {}},
        {"server": {"grpc": 9000}},
        {"replica": {"autoscale": {"min_replicas": 1, "max_replicas": 2, "target_requests": 3, "target": 3}}},
    ],
    ids=json.dumps,
)
def test_an_unknown_key_of_the_configuration_is_refused_by_chart_and_command_alike(
    helm: Helm, tree: dict[str, object]
) -> None:
    path = _path_of_last_key(tree)
    with pytest.raises(ConfigError, match=rf"^{re.escape(path)}: unknown key"):
        serve_config(tree, "kubernetes")
    stderr = helm.refusal("minimal-cpu", f"config={json.dumps(tree)}").replace("/", ".")
    *folder, key = path.split(".")
    assert ".".join(["config", *folder]) in stderr
    assert f"'{key}' not allowed" in stderr


def _path_of_last_key(tree: object) -> str:
    keys = []
    while isinstance(tree, dict) and tree:
        key = list(tree)[-1]
        keys.append(key)
        tree = tree[key]
    return ".".join(keys)


def test_lint_refuses_a_misspelt_engine_option(helm: Helm) -> None:
    done = helm.run("lint", "--strict", str(CHART), "--set", "config.replica.max_sequence=8")
    assert done.returncode != 0
    assert "max_sequence" in done.stdout + done.stderr


def test_a_parent_chart_may_pass_its_globals_down(helm: Helm) -> None:
    assert helm.objects("minimal-cpu", 'global={"anything": 1}')


def test_the_examples_mention_no_secret() -> None:
    assert not any("hf_" in str(values(path.name.removesuffix("-values.yaml"))) for path in CHART.glob("ci/*"))
