"""Where models are kept, and the Job that fetches one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from charts import ROOT, Helm, Tree, containers, environment, of_kind, pods


def _cache_volumes(objects: list[Tree]) -> dict[str, Tree]:
    return {
        name: {key: value for key, value in volume.items() if key != "name"}
        for name, pod in pods(objects).items()
        for volume in pod["volumes"]
        if volume["name"] == "cache"
    }


@pytest.mark.parametrize(
    ("example", "volume"),
    [
        ("minimal-cpu", {"emptyDir": {"sizeLimit": "20Gi"}}),
        ("autoscaling", {"persistentVolumeClaim": {"claimName": "demo-bakehouse-cache"}}),
        ("air-gapped", {"persistentVolumeClaim": {"claimName": "models"}}),
        ("multi-node", {"hostPath": {"path": "/mnt/nvme/bakehouse", "type": "Directory"}}),
    ],
)
def test_every_worker_keeps_models_there_and_the_head_keeps_none(helm: Helm, example: str, volume: Tree) -> None:
    objects = helm.objects(example)
    found = _cache_volumes(objects)
    assert set(found) == set(pods(objects)) - {"head"}
    assert all(one == volume for one in found.values())
    for name, box in containers(objects).items():
        told = environment(box)
        assert told.get("HF_HOME", "").startswith("/cache") == (name != "head")
        assert told.get("XDG_CACHE_HOME") == (None if name == "head" else "/cache")


def test_a_claim_is_kept_when_the_release_goes(helm: Helm) -> None:
    (claim,) = of_kind(helm.objects("full"), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "100Gi"


def test_no_claim_is_made_beside_one_that_is_there(helm: Helm) -> None:
    assert not of_kind(helm.objects("air-gapped"), "PersistentVolumeClaim")


def test_no_storage_class_is_not_the_default_one(helm: Helm) -> None:
    (default,) = of_kind(helm.objects("autoscaling"), "PersistentVolumeClaim")
    (none,) = of_kind(helm.objects("autoscaling", "cache.storageClass="), "PersistentVolumeClaim")
    assert "storageClassName" not in default["spec"]
    assert none["spec"]["storageClassName"] == ""


def test_a_claim_for_one_pod_is_enough_for_one_pod(helm: Helm) -> None:
    one_pod = ("cache.type=pvc", "cache.accessMode=ReadWriteOnce", "upgrade.type=None")
    (claim,) = of_kind(helm.objects("minimal-cpu", *one_pod), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_nothing_is_asked_of_the_hub_where_there_is_no_way_out(helm: Helm) -> None:
    assert environment(containers(helm.objects("air-gapped"))["gpu"])["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment(containers(helm.objects("full"))["gpu"])


def _job(helm: Helm, *sets: str) -> Tree:
    (job,) = of_kind(helm.objects("full", *sets), "Job")
    return job


def test_whatever_changes_a_job_is_another_job_as_jobs_are_immutable(helm: Helm) -> None:
    changes = ["config.model.source=a/b", "config.model.revision=x", "image.tag=x", "auth.hfTokenSecret.name=x"]
    jobs = [_job(helm), *(_job(helm, change) for change in changes)]
    assert len({job["metadata"]["name"] for job in jobs}) == len(jobs)
    assert _job(helm, "drain.preStopSeconds=21") == jobs[0]


def test_the_job_writes_into_the_workers_cache_with_the_hubs_token(helm: Helm) -> None:
    pod = _job(helm)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {volume["name"]: volume for volume in pod["volumes"]} == {
        "cache": {"name": "cache", **_cache_volumes(helm.objects("full"))["gpu"]},
        "hf-token": next(one for one in pods(helm.objects("full"))["gpu"]["volumes"] if one["name"] == "hf-token"),
    }
    workers = environment(containers(helm.objects("full"))["gpu"])
    assert environment(container).items() <= workers.items()
    assert pod["automountServiceAccountToken"] is False


def test_the_jobs_command_opens_the_model_as_a_replica_does(
    helm: Helm, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    (container,) = _job(helm)["spec"]["template"]["spec"]["containers"]
    python, *command, source, revision = container["command"]
    assert (python, source, revision) == ("python", "mistralai/Mistral-7B-Instruct-v0.3", "main")
    done = subprocess.run(
        [sys.executable, *command, str(tiny_llama_folder), ""],
        env=os.environ | {"PYTHONPATH": f"{ROOT}/replica", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == str(tiny_llama_folder), done.stderr
