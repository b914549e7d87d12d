"""values.yaml is documented, bound by its schema, and every value in it has an effect."""

import json
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import chart_files
import pytest
import yaml
from bakehouse_cluster.monitoring.rules import rules
from charts import CHART, Helm, cluster, parse, values, values_path

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
POOLS = '[{"name": "a", "minReplicas": 1, "maxReplicas": 1, "resources": {"requests": {"cpu": 2, "memory": 1}}}]'
# Values that another kind does not fit: what to set (and what with it), on top of which example.
CHANGES: dict[str, tuple[str, str]] = {
    "config": ('{"model": {"source": "a/b"}}', "minimal-cpu"),
    "pools": (POOLS, "minimal-cpu"),
    "head.nodeSelector": ('{"a": "b"}', "minimal-cpu"),
    "head.resources.requests.cpu": ("3", "minimal-cpu"),
    "head.resources.requests.memory": ("9Gi", "minimal-cpu"),
    "head.resources.limits.memory": ("9Gi", "minimal-cpu"),
    "rayVersion": ("2.60.1", "full"),
    "image.pullPolicy": ("Never", "full"),
    "image.pullSecrets": ("{other}", "full"),
    "autoscaler.enabled": ("true", "one-gpu"),
    "autoscaler.resources.requests.cpu": ("333m", "full"),
    "autoscaler.resources.requests.memory": ("333Mi", "full"),
    "autoscaler.resources.limits.cpu": ("3", "full"),
    "autoscaler.resources.limits.memory": ("3Gi", "full"),
    "upgrade.type": ("None", "full"),
    "upgrade.gatewayClassName": ("other", "incremental-upgrade"),
    "upgrade.stepSizePercent": ("11", "incremental-upgrade"),
    "upgrade.intervalSeconds": ("11", "incremental-upgrade"),
    "upgrade.maxSurgePercent": ("55", "incremental-upgrade"),
    "drain.graceSeconds": ("200", "full"),
    "auth.keysSecret.key": ("other,config.gateway.keys=/etc/bakehouse/keys/other", "full"),
    "cache.type": ("pvc", "one-gpu"),
    "cache.size": ("7Gi", "full"),
    "cache.accessMode": ("ReadWriteOnce  upgrade.type=None  cache.type=pvc", "minimal-cpu"),
    "cache.existingClaim": ("other", "full"),
    "cache.offline": ("false", "air-gapped"),
    "cache.hostPath": ("/other", "multi-node"),
    "gcsFaultTolerance.enabled": ("false", "full"),
    "serviceAccount.annotations": ('{"a": "b"}', "full"),
    "ingress.paths": ("{/v1,/tokenize}", "full"),
    "ingress.annotations": ('{"a": "b"}', "full"),
    "gatewayApi.parentRefs": ('[{"name": "other"}]', "full"),
    "gatewayApi.hostnames": ("{other.example.org}", "full"),
    "gatewayApi.grpcHostnames": ("{other.example.org}", "full"),
    "gatewayApi.paths": ("{/v1,/tokenize}", "full"),
    "networkPolicy.operatorNamespaces": ("{other}", "full"),
    "networkPolicy.monitoringNamespaces": ("{other}", "full"),
    "networkPolicy.clients": ('[{"podSelector": {}}]', "full"),
    "monitoring.podMonitor.interval": ("33s", "full"),
    "monitoring.podMonitor.labels": ('{"a": "b"}', "full"),
    "monitoring.rules.labels": ('{"a": "b"}', "full"),
    "monitoring.dashboards.labels": ('{"a": "b"}', "full"),
    "monitoring.dashboards.labels.grafana_dashboard": ("other", "full"),
    "monitoring.dashboards.annotations": ('{"a": "b"}', "full"),
}  # fmt: skip


def _leaves(tree: object, path: str = "") -> list[str]:
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}.{key}".lstrip("."))]
    return [path]


def _at(tree: object, path: str) -> object:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _another(value: object) -> str:
    """A value of the same kind that is not `value`."""
    if isinstance(value, bool):
        return "false" if value else "true"
    return str(value + 1) if isinstance(value, int) else "other"


@pytest.mark.parametrize("path", _leaves(DEFAULTS))
def test_every_value_changes_what_is_rendered(helm: Helm, path: str) -> None:
    default = _at(DEFAULTS, path)
    set_in_full = _at(values("full"), path)
    change, example = CHANGES.get(path, (_another(default if set_in_full is None else set_in_full), "full"))
    change, *others = change.split("  ")
    assert helm.objects(example, *others, f"{path}={change}") != helm.objects(example, *others)


def test_every_value_that_is_used_is_documented() -> None:
    used = {
        path
        for template in CHART.glob("templates/*")
        for path in re.findall(r"\.Values\.([A-Za-z.]+)", template.read_text())
    }
    assert used
    assert not [path for path in used if _at(DEFAULTS, path) is None and path not in _leaves(DEFAULTS)]


def test_every_value_says_what_it_is() -> None:
    said = chart_files.descriptions()
    silent = [leaf for leaf in _leaves(DEFAULTS) if not any(_is_within(leaf, path) for path in said)]
    assert not silent
    assert all(text and not text.endswith(".") for text in said.values())


def _is_within(leaf: str, path: str) -> bool:
    return leaf == path or leaf.startswith(f"{path}.")


@pytest.mark.parametrize(
    ("path", "made"),
    [
        (chart_files.SCHEMA, chart_files.values_schema),
        (chart_files.ENVIRONMENT, chart_files.environment),
        (chart_files.RULES, rules),
        (chart_files.README, chart_files.readme),
    ],
)
def test_what_is_made_from_something_else_is_up_to_date(path: Path, made: Callable[[], str]) -> None:
    assert path.read_text() == made(), "run python helm/tools/chart_files.py"


def test_every_value_has_an_entry_in_the_schema() -> None:
    schema = json.loads(chart_files.values_schema())

    def entry(node: dict[str, object], path: list[str]) -> object:
        while isinstance(reference := node.get("$ref"), str):
            node = schema["$defs"][reference.removeprefix("#/$defs/")]
        properties = node.get("properties", {})
        if not path or not isinstance(properties, dict):
            return node
        known = properties.get(path[0], node.get("additionalProperties"))
        return entry(known, path[1:]) if isinstance(known, dict) else None

    assert not [leaf for leaf in _leaves(DEFAULTS) if not entry(schema, leaf.split("."))]


def test_rays_version_is_that_of_the_image(helm: Helm) -> None:
    assert cluster(helm.objects("minimal-cpu"))["rayVersion"] == version("ray")


def test_the_app_is_this_one() -> None:
    meta = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert meta["appVersion"] == version("bakehouse")
    assert meta["annotations"]["bakehouse/ray"] == version("ray")


def test_a_value_that_is_taken_away_is_refused_by_its_path_or_is_as_if_empty(helm: Helm) -> None:
    """A key whose values are all commented out is null, which helm takes for the wish to have no default."""
    for path in nulled(DEFAULTS):
        done = helm.run("template", "demo", str(CHART), "-f", values_path("full"), "--set-json", f"{path}=null")
        refused = "the schema(s)" in done.stderr or "execution error" in done.stderr
        assert refused or done.returncode == 0, (path, done.stderr)


def nulled(tree: dict[str, object], above: str = "") -> Iterator[str]:
    """The path of each value."""
    for key, value in tree.items():
        yield above + key
        if isinstance(value, dict):
            yield from nulled(value, f"{above}{key}.")


def test_who_may_reach_rays_own_ports_cannot_be_left_out(helm: Helm) -> None:
    """No namespace in a policy's `from` is every namespace."""
    assert "operatorNamespaces" in helm.refusal("minimal-cpu", "networkPolicy.operatorNamespaces=null")


def test_texts_stay_texts_whatever_they_look_like(helm: Helm) -> None:
    """To YAML `on` is a truth value, `123` a number, and `*` the beginning of an alias."""
    texts = {
        "nameOverride": "null",
        "image.pullSecrets[0]": "123",
        "upgrade.gatewayClassName": "on",
        "auth.keysSecret.name": "1e6",
        "auth.hfTokenSecret.name": "true",
        "auth.rayToken.secretName": "0x1",
        "gcsFaultTolerance.passwordSecret.name": "y",
        "serviceAccount.name": "off",
        "cache.existingClaim": "010",
        "ingress.className": "yes",
        "ingress.host": "*.example.org",
        "ingress.tlsSecret": "~",
        "ingress.paths[0]": "/a: b #c",
        "networkPolicy.operatorNamespaces[0]": "456",
        "networkPolicy.monitoringNamespaces[0]": "no",
        "pools[2].runtimeClassName": "1.5",
        "gatewayApi.paths[0]": "/{x}",
    }
    changes = [part for path, text in texts.items() for part in ("--set-string", f"{path}={text}")]
    done = helm.run("template", "123", str(CHART), "-f", values_path("full"), *changes)
    assert done.returncode == 0, done.stderr
    found = set(leaves(parse(done.stdout)))
    assert set(texts.values()) - {"on"} <= found  # no Gateway is made here
    assert None not in found
    assert {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in parse(done.stdout)} == {"123"}


def leaves(tree: object) -> Iterator[object]:
    """Every value that is neither mapping nor list."""
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    if parts is None:
        yield tree
    else:
        for part in parts:
            yield from leaves(part)
