"""What a change of values touches: the configuration in place, its replicas, the cluster, or nothing at all.

The guide to upgrades says so in a table. What the operator leaves out when it compares two clusters is restated
here from KubeRay 1.7.0 (`GenerateHashWithoutReplicasAndWorkersToDelete`).
"""

import copy
import json
from enum import StrEnum

import pytest
from charts import Helm, Tree, cluster, of_kind, ray_service, serve_document, values
from documents import page

GUIDE = page("docs/upgrades.md").partition("## Before")[0]


class Effect(StrEnum):
    """The rows of the table."""

    IN_PLACE = "deployments alone"
    RESTART = "args"
    OTHER_OBJECTS = "objects beside the RayService"
    POLICY = "how the RayService is upgraded"
    JOINS = "a group at the end"
    NOTHING = "nothing that the operator compares"
    CLUSTER = "a second cluster"


POOLS = values("full")["pools"]
MORE = {
    "name": "more",
    "minReplicas": 0,
    "maxReplicas": 2,
    "resources": {"requests": {"cpu": "1", "memory": "4Gi"}},
}


def _pools(**changes: object) -> str:
    return f"pools={json.dumps([POOLS[0] | changes, *POOLS[1:]])}"


# What is set on top of `full`, and the words by which the table names it.
CHANGES: list[tuple[str, str, Effect]] = [
    ("config.server.gateways=3", "config.server.gateways", Effect.IN_PLACE),
    ("config.replica.autoscale.max_replicas=3", "config.replica.autoscale", Effect.IN_PLACE),
    ("config.gateway.max_choices=4", "config.gateway.max_choices", Effect.IN_PLACE),
    ("config.gateway.max_prompts=4", "max_prompts", Effect.IN_PLACE),
    ("config.gateway.max_stops=4", "max_stops", Effect.IN_PLACE),
    ("config.gateway.max_stop_chars=4", "max_stop_chars", Effect.IN_PLACE),
    ("config.gateway.max_logprobs=4", "max_logprobs", Effect.IN_PLACE),
    ("config.gateway.max_listed_tokens=4", "max_listed_tokens", Effect.IN_PLACE),
    ("config.gateway.max_tools=4", "max_tools", Effect.IN_PLACE),
    ("config.gateway.max_queued_requests=4", "max_queued_requests", Effect.IN_PLACE),
    ("config.gateway.max_queued_tokens=4", "max_queued_tokens", Effect.IN_PLACE),
    ("config.replica.max_prefill_tokens=512", "config.replica.max_prefill_tokens", Effect.IN_PLACE),
    ("config.replica.max_waiting_requests=4", "max_waiting_requests", Effect.IN_PLACE),
    ("config.model.source=a/b", "model", Effect.RESTART),
    ("config.model.revision=v2", "revision", Effect.RESTART),
    ("config.replica.kv_memory=8GiB", "kv_memory", Effect.RESTART),
    ("config.replica.tensor_parallel=1", "tensor_parallel", Effect.RESTART),
    ("config.tracing.enabled=false", "tracing", Effect.RESTART),
    ("ingress.timeoutSeconds=60", "ingress", Effect.OTHER_OBJECTS),
    ("gatewayApi.timeoutSeconds=60", "gatewayApi", Effect.OTHER_OBJECTS),
    ("networkPolicy.enabled=false", "networkPolicy", Effect.OTHER_OBJECTS),
    ("podDisruptionBudget.enabled=false", "podDisruptionBudget", Effect.OTHER_OBJECTS),
    ("monitoring.rules.enabled=false", "monitoring", Effect.OTHER_OBJECTS),
    ("upgrade.deletionDelaySeconds=1200", "upgrade", Effect.POLICY),
    ("upgrade.type=None", "upgrade", Effect.POLICY),
    (f"pools={json.dumps([*POOLS, MORE])}", "a pool appended at the end", Effect.JOINS),
    (_pools(minReplicas=1), "minReplicas", Effect.NOTHING),
    (_pools(maxReplicas=9), "maxReplicas", Effect.NOTHING),
    (_pools(replicas=3), "replicas", Effect.NOTHING),
    (_pools(tolerations=[{"key": "a", "operator": "Exists"}]), "tolerations", Effect.NOTHING),
    ('head.tolerations=[{"key": "a", "operator": "Exists"}]', "tolerations", Effect.NOTHING),
    ("image.tag=0.2.0", "image", Effect.CLUSTER),
    ("rayVersion=2.61.0", "rayVersion", Effect.CLUSTER),
    ("head.resources.limits.memory=9Gi", "resources", Effect.CLUSTER),
    (_pools(env=[{"name": "A", "value": "b"}]), "env", Effect.CLUSTER),
    (_pools(gpus=1), "gpus", Effect.CLUSTER),
    (_pools(shm="2Gi"), "shm", Effect.CLUSTER),
    ('head.nodeSelector={"a": "b"}', "nodeSelector", Effect.CLUSTER),
    (f"pools={json.dumps([POOLS[1], POOLS[0], *POOLS[2:]])}", "order", Effect.CLUSTER),
    ("config.server.ingress=proxy", "server.ingress", Effect.CLUSTER),
    ("autoscaler.idleTimeoutSeconds=99", "autoscaler", Effect.CLUSTER),
    ("drain.preStopSeconds=21", "drain", Effect.CLUSTER),
    ("auth.rayToken.enabled=false", "auth", Effect.CLUSTER),
    ("cache.offline=true,cache.prefetch=false", "cache", Effect.CLUSTER),
    ("gcsFaultTolerance.enabled=false", "gcsFaultTolerance", Effect.CLUSTER),
    ("config.server.drain_s=100", "server.drain_s", Effect.CLUSTER),
    ("config.server.port=8001", "server.port", Effect.CLUSTER),
    ("config.server.grpc_port=9001", "server.grpc_port", Effect.CLUSTER),
    ("config.gateway.pools={cpu}", "gateway.pools", Effect.CLUSTER),
]  # fmt: skip


def _compared(config: Tree) -> Tree:
    """Of a cluster, what the operator compares."""
    config = copy.deepcopy(config)
    templates = [config["headGroupSpec"]["template"]]
    for group in config["workerGroupSpecs"]:
        for key in ("replicas", "minReplicas", "maxReplicas"):
            del group[key]
        templates.append(group["template"])
    for template in templates:
        template["spec"].pop("tolerations", None)
    return config


def _beside(objects: list[Tree]) -> list[Tree]:
    return [one for one in objects if one["kind"] != "RayService"]


def _effect(before: list[Tree], after: list[Tree]) -> Effect:
    was, now = _compared(cluster(before)), _compared(cluster(after))
    n_groups = len(was["workerGroupSpecs"])
    if was != now:
        now["workerGroupSpecs"] = now["workerGroupSpecs"][:n_groups]
        return Effect.JOINS if was == now else Effect.CLUSTER
    if cluster(before) != cluster(after):
        return Effect.NOTHING
    (was_served,), (served,) = serve_document(before)["applications"], serve_document(after)["applications"]
    if was_served["args"] != served["args"]:
        return Effect.RESTART
    if serve_document(before) != serve_document(after):
        assert was_served | {"deployments": []} == served | {"deployments": []}
        return Effect.IN_PLACE
    return Effect.POLICY if ray_service(before) != ray_service(after) else Effect.OTHER_OBJECTS


@pytest.mark.parametrize(("change", "words", "effect"), CHANGES, ids=[words for _, words, _ in CHANGES])
def test_a_change_touches_what_the_guide_says(helm: Helm, change: str, words: str, effect: Effect) -> None:
    before, after = helm.objects("full"), helm.objects("full", change)
    assert before != after
    assert _effect(before, after) == effect
    if effect is Effect.OTHER_OBJECTS:
        assert _beside(before) != _beside(after)
    assert words in GUIDE


def test_where_proxies_make_spans_tracing_touches_the_cluster(helm: Helm) -> None:
    proxy = "config.server.ingress=proxy"
    before, after = helm.objects("full", proxy), helm.objects("full", proxy, "config.tracing.enabled=false")
    assert _effect(before, after) is Effect.CLUSTER
    assert "`tracing` with `server.ingress: proxy`" in GUIDE


def test_the_grace_that_the_guide_computes_is_the_charts(helm: Helm) -> None:
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in page("docs/upgrades.md").splitlines() if
            line.startswith("| grace, computed")]  # fmt: skip
    ((default, ten_minutes),) = rows
    for drain_s, grace in ((30, default), (600, ten_minutes)):
        objects = helm.objects("minimal-cpu", f"config.server.drain_s={drain_s}")
        (group,) = cluster(objects)["workerGroupSpecs"]
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] == int(grace)
        (service,) = of_kind(objects, "RayService")
        assert service["spec"]["rayClusterDeletionDelaySeconds"] == 600
