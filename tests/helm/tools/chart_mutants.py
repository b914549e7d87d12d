#!/usr/bin/env python3
"""Prove that chartcheck guards this chart: break its rendered manifest in many ways, each must be refused.

    helm template demo helm -n llm -f helm/ci/full-values.yaml | chart_mutants.py -

Give it the manifest with the most things switched on (Ingress, PodMonitor, dashboard, ...). A mutation
that the manifest has no place for is skipped and named. Exit status: 0 all refused, 1 one was let
through, or the manifest has complaints unbroken, or fewer than --least applied, 2 it could not run.
"""

import argparse
import copy
import json
import pathlib
import sys

import chartcheck
import yaml


def one(d, kind):
    return next(o for o in d if o["kind"] == kind)


def rs(d):
    return one(d, "RayService")["spec"]


def cluster(d):
    return rs(d)["rayClusterConfig"]


def head(d):
    return cluster(d)["headGroupSpec"]["template"]["spec"]


def worker(d):
    return cluster(d)["workerGroupSpecs"][-1]


def pod(d):
    return worker(d)["template"]["spec"]


def box(d):
    return pod(d)["containers"][0]


def limits(d):
    return box(d)["resources"]["limits"]


def gpu(d):
    return next(k for k in limits(d) if k.endswith("gpu"))


def labels(d):
    return worker(d)["template"].setdefault("metadata", {}).setdefault("labels", {})


def env(d, **e):
    return box(d).setdefault("env", []).append(e)


def deployment(doc):
    return next(x for a in doc["applications"] for x in a["deployments"])


def dashboard(d):
    return next(
        (o["data"], k)
        for o in d
        if o["kind"] == "ConfigMap"
        for k, v in o["data"].items()
        if k.endswith(".json") and "panels" in json.loads(v)
    )


def serve(d, change):
    doc = yaml.safe_load(rs(d)["serveConfigV2"])
    change(doc)
    rs(d)["serveConfigV2"] = yaml.safe_dump(doc)


def put(data_key, value):
    data_key[0][data_key[1]] = value


MUTANTS = {
    "unknown field in spec": lambda d: rs(d).update(serveConfigV3="x"),
    "unknown field in a container": lambda d: box(d).update(imagePullPolcy="Always"),
    "replicas as a string": lambda d: worker(d).update(replicas="1"),
    "replicas above maxReplicas": lambda d: worker(d).update(replicas=worker(d)["maxReplicas"] + 1),
    "minReplicas above maxReplicas": lambda d: worker(d).update(minReplicas=worker(d)["maxReplicas"] + 1),
    "env value not a string": lambda d: env(d, name="A_NUMBER", value=1),
    "env twice": lambda d: [env(d, name="TWICE", value="1") for _ in range(2)],
    "secret in clear text": lambda d: env(d, name="HF_TOKEN_OLD_PASSWORD", value="x"),
    "rayStartParams not strings": lambda d: (
        cluster(d)["headGroupSpec"].setdefault("rayStartParams", {}).update({"num-cpus": 0})
    ),
    "no headGroupSpec": lambda d: cluster(d).pop("headGroupSpec"),
    "managedBy (CEL rule)": lambda d: rs(d).update(managedBy="me"),
    "authOptions.mode": lambda d: cluster(d).update(authOptions={"mode": "basic"}),
    "upgrade type": lambda d: rs(d).update(upgradeStrategy={"type": "Rolling"}),
    "incremental upgrade without options": lambda d: rs(d).update(
        upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"}
    ),
    "field behind a feature gate": lambda d: cluster(d).update(networkPolicy={}),
    "name of 48 characters": lambda d: one(d, "RayService")["metadata"].update(name="a" * 48),
    "label value with +": lambda d: (
        one(d, "RayService")["metadata"].setdefault("labels", {}).update(version="1+2")
    ),
    "mount of an unknown volume": lambda d: (
        box(d).setdefault("volumeMounts", []).append({"name": "zz", "mountPath": "/zz"})
    ),
    "port name of 16 characters": lambda d: (
        box(d).setdefault("ports", []).append({"name": "a" * 16, "containerPort": 99})
    ),
    "image without a tag": lambda d: box(d).update(image="example.org/x:"),
    "bad quantity": lambda d: limits(d).update(memory="64 GB"),
    "GPU request differs from limit": lambda d: (
        box(d)["resources"].setdefault("requests", {}).update({gpu(d): int(limits(d)[gpu(d)]) + 1})
    ),
    "grace period shorter than the drain": lambda d: pod(d).update(terminationGracePeriodSeconds=5),
    "grace period of the head": lambda d: head(d).update(terminationGracePeriodSeconds=5),
    "chart version in pod labels": lambda d: labels(d).update({"helm.sh/chart": "x-1"}),
    "checksum in pod annotations": lambda d: (
        worker(d)["template"].setdefault("metadata", {}).update(annotations={"checksum/config": "x"})
    ),
    "group name twice": lambda d: cluster(d)["workerGroupSpecs"].append(copy.deepcopy(worker(d))),
    "no port named serve": lambda d: head(d)["containers"][0].update(
        ports=[{"name": "http", "containerPort": 8000}]
    ),
    "Serve on another port": lambda d: serve(d, lambda s: s.setdefault("http_options", {}).update(port=8123)),
    "gRPC port without a container port": lambda d: serve(
        d, lambda s: s.update(grpc_options={"port": 9123, "grpc_servicer_functions": ["a.b"]})
    ),
    "proxy_location HeadOnly": lambda d: serve(d, lambda s: s.update(proxy_location="HeadOnly")),
    "labels that no group has": lambda d: serve(
        d, lambda s: deployment(s).setdefault("ray_actor_options", {}).update(label_selector={"no": "where"})
    ),
    "more GPUs than a pod has": lambda d: serve(
        d, lambda s: deployment(s).update(placement_group_bundles=[{"GPU": 999}])
    ),
    "serveConfigV2 not YAML": lambda d: rs(d).update(serveConfigV2="a: ["),
    "PDB with maxUnavailable": lambda d: (
        one(d, "PodDisruptionBudget")["spec"].pop("minAvailable"),
        one(d, "PodDisruptionBudget")["spec"].update(maxUnavailable=1),
    ),
    "PDB that selects nothing": lambda d: one(d, "PodDisruptionBudget")["spec"].update(
        selector={"matchLabels": {"a": "b"}}
    ),
    "unknown field in PDB": lambda d: one(d, "PodDisruptionBudget")["spec"].update(minAvailabel=1),
    "Ingress pathType": lambda d: one(d, "Ingress")["spec"]["rules"][0]["http"]["paths"][0].update(
        pathType="prefix"
    ),
    "Ingress to an unknown Service": lambda d: one(d, "Ingress")["spec"]["rules"][0]["http"]["paths"][0][
        "backend"
    ]["service"].update(name="nobody"),
    "HTTPRoute path (CEL rule)": lambda d: one(d, "HTTPRoute")["spec"]["rules"][0].update(
        matches=[{"path": {"type": "PathPrefix", "value": "v1"}}]
    ),
    "HTTPRoute to an unknown port": lambda d: one(d, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0].update(
        port=1
    ),
    "NetworkPolicy from not a list": lambda d: one(d, "NetworkPolicy")["spec"].update(ingress=[{"from": {}}]),
    "NetworkPolicy that selects nothing": lambda d: one(d, "NetworkPolicy")["spec"].update(
        podSelector={"matchLabels": {"a": "b"}}
    ),
    "PodMonitor unknown field": lambda d: one(d, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(
        portNumbr=1
    ),
    "PodMonitor port that no pod has": lambda d: one(d, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(
        port="nope"
    ),
    "PromQL in a rule": lambda d: one(d, "PrometheusRule")["spec"]["groups"][0]["rules"][0].update(
        expr="sum(rate(x[5m])"
    ),
    "PromQL in a dashboard": lambda d: put(dashboard(d), '{"panels": [{"targets": [{"expr": "sum(("}]}]}'),
    "PVC accessModes": lambda d: one(d, "PersistentVolumeClaim")["spec"].update(accessModes=["RWX"]),
    "PVC quantity": lambda d: one(d, "PersistentVolumeClaim")["spec"]["resources"]["requests"].update(
        storage="200 Gi"
    ),
}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("file", metavar="FILE", help="rendered manifest; - is standard input")
    ap.add_argument(
        "--least",
        type=int,
        default=30,
        metavar="N",
        help=f"how many of the {len(MUTANTS)} mutations must apply (default 30)",
    )
    ap.add_argument("--kube", default=chartcheck.KUBE, metavar="X.Y")
    a = ap.parse_args()
    missed, skipped, caught = [], [], 0
    try:
        objs, errs = chartcheck.parse(
            sys.stdin.read() if a.file == "-" else pathlib.Path(a.file).read_text(), a.file
        )
        errs = errs or chartcheck.check(objs, kube=a.kube)
        if errs:
            print("the manifest has complaints before any mutation:", *errs, sep="\n")
            return 1
        for name, change in MUTANTS.items():
            d = copy.deepcopy(objs)
            try:
                change(d)
            except (KeyError, IndexError, StopIteration, TypeError, AttributeError):
                skipped.append(name)
                continue
            changed = [o for o, old in zip(d, objs, strict=False) if o != old]
            errs = [e for o in changed for e in chartcheck.check_object(o, kube=a.kube)]
            errs = errs or [e for o in changed for e in chartcheck.prom_rules(o)] or list(chartcheck.links(d))
            print(f"{'caught' if errs else 'MISSED'}  {name}: {errs[0][:110] if errs else 'no complaint'}")
            missed += [] if errs else [name]
            caught += bool(errs)
    except (chartcheck.CannotRun, OSError) as e:
        print(f"chart_mutants: {e}", file=sys.stderr)
        return 2
    for name in skipped:
        print(f"skipped {name}: nothing to break in this manifest")
    print(
        f"{caught} of {caught + len(missed)} mutations refused, {len(skipped)} skipped"
        + (f"; let through: {', '.join(missed)}" if missed else "")
    )
    if caught + len(missed) < a.least:
        print(f"fewer than {a.least} mutations applied: render with more switched on")
    return int(bool(missed) or caught < a.least)


if __name__ == "__main__":
    sys.exit(main())
