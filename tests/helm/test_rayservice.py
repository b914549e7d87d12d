"""The cluster that the chart asks for: head, pools, placement, drain, access."""

import json

import pytest
from charts import Helm, Tree, cluster, containers, environment, pods, ray_service, values


def _groups(objects: list[Tree]) -> dict[str, Tree]:
    return {group["groupName"]: group for group in cluster(objects)["workerGroupSpecs"]}


def test_nothing_is_placed_on_the_head(helm: Helm, example: str) -> None:
    objects = helm.objects(example)
    assert cluster(objects)["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert ray_service(objects)["excludeHeadPodFromServeSvc"] is True


def test_pools_are_groups_in_their_order_with_their_name_as_a_label(helm: Helm, example: str) -> None:
    groups = cluster(helm.objects(example))["workerGroupSpecs"]
    names = [pool["name"] for pool in values(example).get("pools", [{"name": "cpu"}])]
    assert [group["groupName"] for group in groups] == names
    assert [group["labels"] for group in groups] == [{"bakehouse/pool": name} for name in names]


def test_an_appended_pool_leaves_the_groups_before_it_as_they_are(helm: Helm, example: str) -> None:
    pool = {
        "name": "more",
        "minReplicas": 0,
        "maxReplicas": 2,
        "resources": {"requests": {"cpu": 1, "memory": "4Gi"}},
    }
    pools = values(example).get("pools") or [pool | {"name": "cpu", "minReplicas": 1}]
    before = cluster(helm.objects(example, f"pools={json.dumps(pools)}"))
    after = cluster(helm.objects(example, f"pools={json.dumps([*pools, pool])}"))
    *same, added = after.pop("workerGroupSpecs")
    assert same == before.pop("workerGroupSpecs")
    assert after == before
    assert added["groupName"] == "more"


def test_gpus_are_requests_and_limits_and_tolerate_their_taint(helm: Helm) -> None:
    objects = helm.objects("tensor-parallel-4")
    resources = containers(objects)["gpu"]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 4
    assert pods(objects)["gpu"]["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert "tolerations" not in pods(objects)["cpu"]
    assert "nvidia.com/gpu" not in str(containers(objects)["cpu"]["resources"])


def test_gpus_may_have_another_name(helm: Helm) -> None:
    objects = helm.objects("one-gpu", "pools[0].gpuResource=nvidia.com/mig-3g.40gb")
    assert containers(objects)["gpu"]["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    assert pods(objects)["gpu"]["tolerations"][0]["key"] == "nvidia.com/mig-3g.40gb"


def test_every_pod_has_shared_memory_of_its_size(helm: Helm) -> None:
    objects = helm.objects("tensor-parallel-4")
    sizes = {"head": "1Gi", "cpu": "1Gi", "gpu": "16Gi"}
    for name, pod in pods(objects).items():
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": sizes[name]}} in pod["volumes"]


def test_hosts_of_a_replica_live_and_die_together(helm: Helm) -> None:
    assert {name: group["numOfHosts"] for name, group in _groups(helm.objects("multi-node")).items()} == {
        "cpu": 1,
        "gpu": 2,
    }


def test_the_autoscaler_is_rays_own_v2(helm: Helm) -> None:
    objects = helm.objects("autoscaling")
    assert cluster(objects)["enableInTreeAutoscaling"] is True
    assert cluster(objects)["autoscalerOptions"]["version"] == "v2"
    assert _groups(objects)["spot"]["idleTimeoutSeconds"] == 1800
    assert "restartPolicy" not in pods(objects)["head"]
    assert "autoscalerOptions" not in cluster(helm.objects("minimal-cpu"))


def test_only_the_head_of_an_autoscaler_has_a_token_of_kubernetes(helm: Helm) -> None:
    def with_token(example: str) -> list[str]:
        found = pods(helm.objects(example))
        return [name for name, pod in found.items() if pod["automountServiceAccountToken"]]

    assert with_token("autoscaling") == ["head"]
    assert with_token("tensor-parallel-4") == []


@pytest.mark.parametrize(
    ("example", "pause", "drain", "grace"), [("minimal-cpu", 15, 30, 60), ("full", 20, 120, 180)]
)
def test_a_pod_that_goes_is_forgotten_first_then_drained_then_killed(
    helm: Helm, example: str, pause: int, drain: int, grace: int
) -> None:
    objects = helm.objects(example)
    assert pause + drain < grace
    for name, pod in pods(objects).items():
        (container,) = pod["containers"]
        assert pod["terminationGracePeriodSeconds"] == grace
        assert environment(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == str(drain)
        hook = {"preStop": {"exec": {"command": ["sleep", str(pause)]}}}
        assert container.get("lifecycle") == (None if name == "head" else hook)


def test_pods_fit_the_restricted_profile(helm: Helm, example: str) -> None:
    objects = helm.objects(example)
    for pod in pods(objects).values():
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 1000,  # the image's, to whom volumes are given by their group
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_keys_are_files_of_the_gateways_pods_only_and_change_without_a_restart(helm: Helm) -> None:
    objects = helm.objects("tensor-parallel-4")
    mounts = {name: {m["name"]: m for m in box["volumeMounts"]} for name, box in containers(objects).items()}
    assert mounts["cpu"]["keys"] == {
        "name": "keys",
        "mountPath": "/etc/bakehouse/keys",
        "readOnly": True,
    }  # no subPath
    assert "keys" not in mounts["gpu"]
    assert "keys" not in mounts["head"]
    secret = next(volume["secret"] for volume in pods(objects)["cpu"]["volumes"] if volume["name"] == "keys")
    assert secret["secretName"] == "bakehouse-keys"
    assert secret["items"] == [{"key": "keys.yaml", "path": "keys.yaml"}]
    assert values("tensor-parallel-4")["config"]["gateway"]["keys"] == "/etc/bakehouse/keys/keys.yaml"


def test_the_hubs_token_is_a_file_which_the_hubs_client_is_told_of(helm: Helm) -> None:
    objects = helm.objects("full")
    for name, box in containers(objects).items():
        mounted = {mount["mountPath"] for mount in box["volumeMounts"]}
        assert ("/etc/bakehouse/hf" in mounted) == (name != "head")
        assert environment(box).get("HF_TOKEN_PATH") == (None if name == "head" else "/etc/bakehouse/hf/token")


def test_rays_own_token_is_on_unless_it_is_switched_off(helm: Helm) -> None:
    assert cluster(helm.objects("minimal-cpu"))["authOptions"] == {"mode": "token"}
    assert cluster(helm.objects("full"))["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert cluster(helm.objects("minimal-cpu", "auth.rayToken.enabled=false"))["authOptions"] == {
        "mode": "disabled"
    }


def test_the_password_of_redis_comes_from_a_secret(helm: Helm) -> None:
    assert cluster(helm.objects("full"))["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.llm.svc:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    assert "gcsFaultToleranceOptions" not in cluster(helm.objects("minimal-cpu"))


def test_grpc_has_a_port_and_says_that_it_is_http_2(helm: Helm) -> None:
    objects = helm.objects("full")
    for box in containers(objects).values():
        assert {"name": "serve-grpc", "containerPort": 9000} in box["ports"]
    (_, port) = ray_service(objects)["serveService"]["spec"]["ports"]
    assert port == {"name": "serve-grpc", "port": 9000, "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"}
    assert "serveService" not in ray_service(helm.objects("minimal-cpu"))


def test_how_an_upgrade_goes_is_said(helm: Helm) -> None:
    assert ray_service(helm.objects("minimal-cpu"))["upgradeStrategy"] == {"type": "NewCluster"}
    assert ray_service(helm.objects("tensor-parallel-4"))["upgradeStrategy"] == {"type": "None"}
    assert ray_service(helm.objects("incremental-upgrade"))["upgradeStrategy"] == {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {
            "gatewayClassName": "istio", "stepSizePercent": 25, "intervalSeconds": 60, "maxSurgePercent": 100,
        },
    }  # fmt: skip
    assert ray_service(helm.objects("full"))["rayClusterDeletionDelaySeconds"] == 900


def test_the_name_is_the_releases_and_the_charts_unless_it_is_given(helm: Helm) -> None:
    def name(*sets: str, release: str) -> object:
        return next(
            one for one in helm.objects("minimal-cpu", *sets, name=release) if one["kind"] == "RayService"
        )["metadata"]["name"]

    assert name(release="demo") == "demo-bakehouse"
    assert name(release="my-bakehouse") == "my-bakehouse"
    assert name("nameOverride=chat", release="demo") == "chat"
