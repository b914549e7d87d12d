#!/usr/bin/env python3
"""Check rendered Kubernetes manifests without a cluster.

    helm template demo helm -n llm -f values.yaml | chartcheck.py -
    chartcheck.py rendered.yaml

What is checked:
  text      YAML as Kubernetes reads it; duplicate keys; 1e+06 instead of an integer; an empty input
  schema    core kinds with --strict (kubernetes-validate); kinds of crds/ as strictly as the API server
            does with fieldValidation=Strict: unknown fields, types, CEL rules, keys of list maps
  values    names, label values, quantities, enumerations that the core schemas leave open
  pods      ports, mounts, volumes, env, images, GPU request = limit, secrets in clear text
  KubeRay   the operator's own validation (v1.7.0), Ray's drain against the grace period, probes' needs
  placement each deployment of serveConfigV2 fits the labels and GPUs of a worker group
  links     selectors that match no pod, routes to unknown Services, PodMonitor ports that do not exist
  PromQL    PrometheusRules and Grafana dashboards in ConfigMaps, with promtool

Exit status: 0 nothing to complain about, 1 complaints (one a line), 2 the check could not run.
From Python: chartcheck.check_text(text) and chartcheck.check(objects) return the complaints as a list.
"""

import argparse
import collections
import copy
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
try:
    import cel
    import jsonschema
    import kubernetes_validate
    import yaml
except ImportError as e:
    MISSING = f"the Python module {e.name!r} is missing; pip install it (kubernetes-validate, common-expression-language, jsonschema, PyYAML)"
    if __name__ != "__main__":
        raise ImportError(MISSING) from e
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        sys.exit(0)
    print(f"chartcheck: {MISSING}", file=sys.stderr)
    sys.exit(2)

KUBE = "1.34"
CRDS = pathlib.Path(os.environ.get("BAKEHOUSE_CRDS", HERE / "crds"))
CEL_NOT_RUN = []  # (path, rule, error): rules that the CEL library could not evaluate


class CannotRun(Exception):
    """The check itself cannot be done: a tool or a file is missing."""


# --- text ---------------------------------------------------------------------------------------


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Safe YAML nearer to Kubernetes' own: no dates, no base-60 numbers, no duplicate keys."""


def _mapping(loader, node, deep=False):
    seen = set()
    for k, _ in node.value:
        name = (k.tag, k.value) if isinstance(k, yaml.ScalarNode) else None
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {k.value!r}", k.start_mark)
        seen.add(name)
    loader.flatten_mapping(node)
    return {loader.construct_object(k, True): loader.construct_object(v, True) for k, v in node.value}


def _float(loader, node):
    if "e" in node.value.lower():
        raise yaml.constructor.ConstructorError(
            None, None, f"number {node.value} in exponent form (in a template: | int64)", node.start_mark
        )
    return float(node.value)


_DROP = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"}
Loader.yaml_implicit_resolvers = {
    c: [x for x in v if x[0] not in _DROP] for c, v in Loader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01]+|0o?[0-7]*|0x[0-9a-fA-F]+|[1-9][0-9]*)$"),
    list("-+0123456789"),
)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
Loader.add_constructor("tag:yaml.org,2002:float", _float)


def parse(text, where="input"):
    """The objects of a YAML stream, and the complaints about its form."""
    errs, objs = [], []
    try:
        docs = [d for d in yaml.load_all(text, Loader) if d is not None]
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        return [], [
            f"{where}: {f'line {mark.line + 1}: ' if mark else ''}{getattr(e, 'problem', None) or ' '.join(str(e).split())}"
        ]
    docs = [
        x
        for d in docs
        for x in (
            d["items"]
            if isinstance(d, dict) and d.get("kind") == "List" and isinstance(d.get("items"), list)
            else [d]
        )
    ]
    for i, d in enumerate(docs):
        bad = [k for k in ("apiVersion", "kind") if not isinstance(d, dict) or not isinstance(d.get(k), str)]
        if not bad and not (isinstance(d.get("metadata"), dict) and isinstance(d["metadata"].get("name"), str)):
            bad = ["metadata.name"]
        if bad:
            errs.append(f"{where}: document {i + 1} has no {' and no '.join(bad)}")
        else:
            objs.append(d)
    if not docs:
        errs.append(f"{where}: no object in it (did helm template fail?)")
    return objs, errs


def name_of(o):
    return f"{o['kind']}/{o['metadata']['name']}"


# --- schemas ------------------------------------------------------------------------------------

Crd = collections.namedtuple("Crd", "schema plural namespaced")


@functools.lru_cache(None)
def load_crds(folder=CRDS):
    """{(apiVersion, kind): Crd} of all CustomResourceDefinitions in a folder (.json, .yaml)."""
    crds = {}
    for f in sorted(pathlib.Path(folder).glob("*")):
        if f.suffix not in (".json", ".yaml", ".yml"):
            continue
        for d in yaml.load_all(f.read_text(), Loader) if f.suffix != ".json" else [json.loads(f.read_text())]:
            if isinstance(d, dict) and d.get("kind") == "CustomResourceDefinition":
                for v in d["spec"]["versions"]:
                    crds[f"{d['spec']['group']}/{v['name']}", d["spec"]["names"]["kind"]] = Crd(
                        v["schema"]["openAPIV3Schema"],
                        d["spec"]["names"]["plural"],
                        d["spec"]["scope"] == "Namespaced",
                    )
    if not crds:
        raise CannotRun(f"no CustomResourceDefinition found in {folder}")
    return crds


_COPIED = {
    "type",
    "enum",
    "required",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "pattern",
    "uniqueItems",
}


def to_json_schema(n, strict=True, top=False):
    """openAPIV3Schema of a CRD as a JSON schema that refuses what fieldValidation=Strict refuses."""
    out = {}
    for k, v in n.items():
        if k == "properties":
            out[k] = {p: to_json_schema(s, strict) for p, s in v.items()}
        elif k in ("items", "not", "additionalProperties"):
            out[k] = to_json_schema(v, strict) if isinstance(v, dict) else v
        elif k in ("allOf", "anyOf", "oneOf"):
            out[k] = [to_json_schema(x, strict=False) for x in v]
        elif k in _COPIED:
            out[k] = v
    if n.get("x-kubernetes-int-or-string"):
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if n.get("format") in ("int32", "int64") and "type" in out:
        bits = int(n["format"][3:]) - 1
        out.setdefault("minimum", -(2**bits))
        out.setdefault("maximum", 2**bits - 1)
    if n.get("nullable") and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
    if (
        strict
        and "properties" in out
        and "additionalProperties" not in out
        and not n.get("x-kubernetes-preserve-unknown-fields")
    ):
        out["additionalProperties"] = False
    if top:
        out["properties"] = out.get("properties", {}) | {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
        }
    return out


@functools.lru_cache(None)
def _validator(folder, key):
    return jsonschema.Draft202012Validator(to_json_schema(load_crds(folder)[key].schema, top=True))


def defaulted(schema, value):
    """Fill in the CRD's defaults, as the server does before it runs CEL."""
    if isinstance(value, dict):
        for k, sub in schema.get("properties", {}).items():
            if k not in value and "default" in sub:
                value[k] = copy.deepcopy(sub["default"])
            if k in value:
                value[k] = defaulted(sub, value[k])
        if isinstance(schema.get("additionalProperties"), dict):
            for k in value:
                value[k] = defaulted(schema["additionalProperties"], value[k])
    elif isinstance(value, list):
        value = [defaulted(schema.get("items", {}), x) for x in value]
    return value


def schema_rules(schema, value, path="$"):
    """CEL rules (those on oldSelf do not apply to a creation) and keys of list maps."""
    for r in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in r["rule"]:
            continue
        try:
            if not cel.evaluate(r["rule"], {"self": value}):
                yield f"{path}: {r.get('message', r['rule'])}"
        except Exception as e:  # the library's errors have no common base; --verbose lists them
            CEL_NOT_RUN.append((path, r["rule"], str(e)))
    if isinstance(value, dict):
        for k, v in value.items():
            extra = schema.get("additionalProperties")
            sub = schema.get("properties", {}).get(k) or (extra if isinstance(extra, dict) else None)
            if sub:
                yield from schema_rules(sub, v, f"{path}.{k}")
    elif isinstance(value, list):
        items, keys, seen = schema.get("items", {}), schema.get("x-kubernetes-list-map-keys"), set()
        for i, x in enumerate(value):
            if keys and isinstance(x, dict):
                t = tuple(x.get(k, items.get("properties", {}).get(k, {}).get("default")) for k in keys)
                if t in seen:
                    yield f"{path}[{i}]: duplicate {dict(zip(keys, t, strict=False))}"
                seen.add(t)
            yield from schema_rules(items, x, f"{path}[{i}]")


# --- values that no schema checks -----------------------------------------------------------------

DNS_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
QUALIFIED = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
QUANTITY = r"[-+]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?\d+)?"
CORE_ENUMS = {
    "pathType": {"Exact", "Prefix", "ImplementationSpecific"},
    "protocol": {"TCP", "UDP", "SCTP", "HTTP", "HTTPS", "TLS"},
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "unhealthyPodEvictionPolicy": {"AlwaysAllow", "IfHealthyBudget"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "policyTypes": {"Ingress", "Egress"},
    "medium": {"", "Memory", "HugePages"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "concurrencyPolicy": {"Allow", "Forbid", "Replace"},
}
FREE_FORM = {"labels", "annotations", "matchLabels", "nodeSelector", "data", "stringData", "selector"}


def enums(v, path="$"):
    if isinstance(v, dict):
        for k, x in v.items():
            for one in x if isinstance(x, list) else [x]:
                if k in CORE_ENUMS and isinstance(one, str) and one not in CORE_ENUMS[k]:
                    yield f"{path}.{k}: {one!r} is not one of {', '.join(sorted(filter(None, CORE_ENUMS[k])))}"
            if k not in FREE_FORM:
                yield from enums(x, f"{path}.{k}")
    elif isinstance(v, list):
        for i, x in enumerate(v):
            yield from enums(x, f"{path}[{i}]")


def labels_ok(labels, path):
    for k, v in (labels or {}).items():
        if not re.fullmatch(QUALIFIED, str(k)):
            yield f"{path}: {k!r} is not a label key"
        if not isinstance(v, str) or not re.fullmatch(LABEL_VALUE, v):
            yield f"{path}.{k}: {v!r} is not a label value (at most 63 of A-Z a-z 0-9 - _ .)"


def meta_ok(o):
    m, kind = o["metadata"], o["kind"]
    if not o["apiVersion"].startswith("rbac."):
        limit, form = (
            (63, r"[a-z]([-a-z0-9]*[a-z0-9])?") if kind == "Service" else (253, rf"{DNS_LABEL}(\.{DNS_LABEL})*")
        )
        if len(m["name"]) > limit or not re.fullmatch(form, m["name"]):
            yield f"metadata.name {m['name']!r}: not a valid name of a {kind}"
    yield from labels_ok(m.get("labels"), "metadata.labels")
    for k, v in (m.get("annotations") or {}).items():
        if not isinstance(v, str):
            yield f"metadata.annotations.{k}: {v!r} is not a string"


def quantities(resources, path):
    for part in ("requests", "limits"):
        for k, v in ((resources or {}).get(part) or {}).items():
            if not re.fullmatch(QUANTITY, str(v)):
                yield f"{path}.{part}.{k}: {v!r} is not a quantity"


SECRET_NAME = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEYS?)$")


def pod_rules(spec, path):
    """What the API server checks of a pod and no schema says, and secrets in clear text."""

    def twice(xs):
        return sorted({str(x) for x in xs if xs.count(x) > 1})

    containers = (spec.get("initContainers") or []) + (spec.get("containers") or [])
    if not spec.get("containers"):
        yield f"{path}: no container"
    volumes = [v["name"] for v in spec.get("volumes") or []]
    for d in twice(volumes):
        yield f"{path}.volumes: {d} twice"
    for d in twice([c["name"] for c in containers]):
        yield f"{path}: container {d} twice"
    for c in containers:
        p = f"{path}.{c['name']}"
        if not re.fullmatch(r"[^\s:@]\S*[^\s:@/]", c.get("image") or ""):
            yield f"{p}: image {c.get('image')!r}"
        ports = c.get("ports") or []
        for x in ports:
            if "name" in x and not re.fullmatch(
                r"(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?", x["name"]
            ):
                yield f"{p}: port name {x['name']!r} (at most 15 of a-z 0-9 -)"
            if not 0 < x["containerPort"] < 65536:
                yield f"{p}: port {x['containerPort']}"
        for d in twice([x["name"] for x in ports if x.get("name")]):
            yield f"{p}: port name {d} twice"
        mounts = c.get("volumeMounts") or []
        for m in mounts:
            if m["name"] not in volumes:
                yield f"{p}: mount of the unknown volume {m['name']}"
        for d in twice([m["mountPath"] for m in mounts]):
            yield f"{p}: two mounts at {d}"
        env = c.get("env") or []
        for d in twice([e["name"] for e in env]):
            yield f"{p}: env {d} twice"
        for e in env:
            if e.get("value") and e.get("valueFrom"):
                yield f"{p}: env {e['name']} has both value and valueFrom"
            if e.get("value") and SECRET_NAME.search(e["name"].upper()):
                yield f"{p}: env {e['name']} holds a secret in clear text (use valueFrom.secretKeyRef)"
        r = c.get("resources") or {}
        yield from quantities(r, f"{p}.resources")
        limits = r.get("limits") or {}
        for k, v in (r.get("requests") or {}).items():
            if "/" in k and str(limits.get(k)) != str(v):
                yield f"{p}: the request of {k} must equal its limit"
        for k, v in limits.items():
            if "/" in k and str((r.get("requests") or {}).get(k, v)) != str(v):
                yield f"{p}: the request of {k} must equal its limit"


def core_pods(o):
    """(path, pod metadata, pod spec) of the pods that a core object makes."""
    s = o.get("spec") or {}
    if o["kind"] == "Pod":
        yield "spec", o["metadata"], s
    elif o["kind"] == "CronJob":
        t = s["jobTemplate"]["spec"]["template"]
        yield "spec.jobTemplate", t.get("metadata") or {}, t["spec"]
    elif (
        isinstance(s.get("template"), dict)
        and "spec" in s["template"]
        and "/" in o["apiVersion"]
        and o["apiVersion"].split("/")[0] in ("apps", "batch")
    ):
        yield "spec.template", s["template"].get("metadata") or {}, s["template"]["spec"]


# --- KubeRay and Ray Serve --------------------------------------------------------------------------


def ray_groups(cluster):
    """(name, group) of head and workers."""
    return [("head", cluster["headGroupSpec"])] + [
        (g["groupName"], g) for g in cluster.get("workerGroupSpecs") or []
    ]


def version(text):
    return tuple(int(x) for x in re.findall(r"\d+", text or "0")[:2])


def serve_doc(o):
    """serveConfigV2 of a RayService as a dict; None when it is not one."""
    try:
        doc = yaml.safe_load(o["spec"].get("serveConfigV2") or "{}")
    except yaml.YAMLError:
        return None
    return doc if isinstance(doc, dict) else None


def _volatile(v, path):
    """Labels and annotations that change with each release of a chart."""
    if isinstance(v, dict):
        for part in ("labels", "annotations"):
            for k in v.get(part) or {} if isinstance(v.get(part), dict) else {}:
                if k in ("helm.sh/chart", "app.kubernetes.io/version") or k.startswith("checksum/"):
                    yield f"{path}.{part}: {k} changes with the chart; in rayClusterConfig that starts a second cluster"
        for k, x in v.items():
            yield from _volatile(x, f"{path}.{k}")
    elif isinstance(v, list):
        for i, x in enumerate(v):
            yield from _volatile(x, f"{path}[{i}]")


def _sleep(container):
    """Seconds that a preStop hook sleeps, as far as it can be read off."""
    hook = (container.get("lifecycle") or {}).get("preStop") or {}
    if "sleep" in hook:
        return float(hook["sleep"].get("seconds") or 0)
    m = re.search(r"\bsleep (\d+)", " ".join((hook.get("exec") or {}).get("command") or []))
    return float(m.group(1)) if m else 0.0


def kuberay_rules(o):
    """The operator's own validation (validation.go of KubeRay v1.7.0, default feature gates), restated, and what breaks Ray on it."""
    s, n = o["spec"], o["metadata"]["name"]
    c = s["rayClusterConfig"]
    if len(n) > 47 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", n):
        yield f"name {n!r}: not a DNS-1035 label of at most 47 characters"
    up = s.get("upgradeStrategy") or {}
    kind = up.get("type")
    if kind not in (None, "None", "NewCluster", "NewClusterWithIncrementalUpgrade"):
        yield f"upgradeStrategy.type {kind!r}: None, NewCluster or NewClusterWithIncrementalUpgrade"
    if (s.get("rayClusterDeletionDelaySeconds") or 0) < 0:
        yield "rayClusterDeletionDelaySeconds is negative"
    auto, opts, ray = (
        c.get("enableInTreeAutoscaling", False),
        c.get("autoscalerOptions") or {},
        version(c.get("rayVersion")),
    )
    v2 = auto and opts.get("version") == "v2"
    if kind == "NewClusterWithIncrementalUpgrade":
        u = up.get("clusterUpgradeOptions") or {}
        surge = u.get("maxSurgePercent", 100)
        if not auto:
            yield "incremental upgrade needs enableInTreeAutoscaling"
        if not u.get("gatewayClassName"):
            yield "incremental upgrade needs clusterUpgradeOptions.gatewayClassName"
        if not 0 <= surge <= 100 or not 0 <= u.get("stepSizePercent", -1) <= surge:
            yield "clusterUpgradeOptions: 0 <= stepSizePercent <= maxSurgePercent <= 100"
        if u.get("intervalSeconds", 0) <= 0:
            yield "clusterUpgradeOptions.intervalSeconds must be above 0"
    if ((c["headGroupSpec"].get("headService") or {}).get("metadata") or {}).get("name"):
        yield "headGroupSpec.headService.metadata.name must not be set in a RayService"
    if "upgradeStrategy" in c:
        yield "rayClusterConfig.upgradeStrategy must not be set in a RayService"
    for field, gate in (
        ("networkPolicy", "RayClusterNetworkPolicy"),
        ("tlsOptions", "RayClusterMTLS"),
        ("historyServerOptions", "RayClusterHistoryServer"),
    ):
        if field in c:
            yield f"rayClusterConfig.{field} needs the operator's feature gate {gate}, which is off by default"
    gcs = c.get("gcsFaultToleranceOptions")
    if gcs and gcs.get("backend") == "rocksdb":
        yield "gcsFaultToleranceOptions.backend rocksdb needs the feature gate GCSFaultToleranceEmbeddedStorage, which is off by default"
    auth = c.get("authOptions") or {}
    if auth.get("mode") == "token" and ray < (2, 52):
        yield "authOptions.mode token needs rayVersion 2.52"
    if auth.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth is not supported in a RayService"
    if (opts.get("idleTimeoutSeconds") or 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds is negative"
    names = [g for g, _ in ray_groups(c)]
    if len(set(names)) != len(names):
        yield f"duplicate worker group names: {', '.join(names)}"
    for name, g in ray_groups(c):
        params, pod = g.get("rayStartParams") or {}, g["template"]["spec"]
        if g.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(params):
            yield f"{name}: resources both in rayStartParams and in resources"
        if "labels" in params:
            yield f"{name}: use labels, not rayStartParams.labels"
        yield from labels_ok(g.get("labels"), f"{name}.labels")
        yield from labels_ok(
            (g["template"].get("metadata") or {}).get("labels"), f"{name}.template.metadata.labels"
        )
        yield from pod_rules(pod, name)
        if not pod.get("containers"):
            continue
        first = pod["containers"][0]
        if v2 and pod.get("restartPolicy", "Never") != "Never":
            yield f"{name}: restartPolicy must be Never or unset with autoscaler v2"
        env = {e["name"]: e.get("value") for e in first.get("env") or []}
        if name == "head":
            for e in {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & set(env):
                yield f"head: env {e}: use gcsFaultToleranceOptions"
            if {"redis-username"} & set(params) or (gcs and "redis-password" in params):
                yield "head: Redis credentials belong in gcsFaultToleranceOptions"
            if "RAY_enable_autoscaler_v2" in env and (opts.get("version") or not auto):
                yield "head: env RAY_enable_autoscaler_v2: use autoscalerOptions.version"
        if version(c.get("rayVersion")) >= (2, 60) or "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" in env:
            try:
                drain = float(env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") or 30)
            except ValueError:
                yield f"{name}: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S is not a number"
                drain = 0
            grace, sleep = pod.get("terminationGracePeriodSeconds", 30), _sleep(first)
            if grace <= drain + sleep:
                yield f"{name}: terminationGracePeriodSeconds {grace} must exceed the preStop sleep {sleep:g} + Ray's drain {drain:g} (SIGKILL comes in the middle)"
        if name == "head" and "serve" not in [p.get("name") for p in first.get("ports") or []]:
            yield "head: the first container has no port named serve: the operator makes no Service for Serve"
        if name != "head":
            low, high = g.get("minReplicas"), g.get("maxReplicas")
            if not auto and (low is None or high is None):
                yield f"{name}: minReplicas and maxReplicas are required without the autoscaler"
            if (low or 0) < 0 or (high or 0) < 0 or (low is not None and high is not None and low > high):
                yield f"{name}: minReplicas {low} and maxReplicas {high}"
            if g.get("replicas") is not None and high is not None and not (low or 0) <= g["replicas"] <= high:
                yield f"{name}: replicas {g['replicas']} outside minReplicas {low} to maxReplicas {high}"
            if g.get("idleTimeoutSeconds") is not None and not v2:
                yield f"{name}: idleTimeoutSeconds needs autoscaler v2"
            if g.get("priority") and (ray < (2, 56) or not v2):
                yield f"{name}: priority needs rayVersion 2.56 and autoscaler v2"
            if g.get("suspend") and auto:
                yield f"{name}: suspend does not work with the autoscaler"
    yield from _volatile(c, "rayClusterConfig")
    yield from _volatile(s.get("serveService") or {}, "serveService")
    yield from serve_rules(o)


def serve_rules(o):
    """serveConfigV2 against the pods: ports, proxies, placement. (servecheck.py checks the document itself.)"""
    doc, c = serve_doc(o), o["spec"]["rayClusterConfig"]
    if doc is None:
        yield "serveConfigV2 is not a YAML mapping"
        return
    if doc.get("proxy_location", "EveryNode") != "EveryNode":
        yield f"serveConfigV2.proxy_location {doc['proxy_location']}: workers stay NotReady for ever (kuberay issue 4994); use EveryNode"
    http, grpc = doc.get("http_options") or {}, doc.get("grpc_options") or {}
    if http.get("host") in ("127.0.0.1", "localhost"):
        yield f"serveConfigV2.http_options.host {http['host']}: no other pod can reach it"
    for name, g in ray_groups(c):
        ports = {
            p.get("name"): p["containerPort"]
            for p in ((g["template"]["spec"].get("containers") or [{}])[0].get("ports") or [])
        }
        if ports.get("serve", 8000) != http.get("port", 8000):
            yield f"{name}: port serve (where the operator's probe looks) is {ports.get('serve', 8000)}, but Serve listens on {http.get('port', 8000)}"
        if (
            name == "head"
            and grpc.get("grpc_servicer_functions")
            and grpc.get("port", 9000) not in [v for k, v in ports.items() if (k or "").startswith("serve-")]
        ):
            yield f"{name}: Serve's gRPC port {grpc.get('port', 9000)} has no container port named serve-*: the Service does not get it"
    nodes = [_capacity(name, g) for name, g in ray_groups(c)]
    for app in doc.get("applications") or []:
        for d in (app.get("deployments") or []) if isinstance(app, dict) else []:
            if isinstance(d, dict):
                yield from _placement(d, nodes)


def _is_gpu(k):
    return k.endswith("gpu") or bool(re.fullmatch(r"nvidia\.com/mig-\d+g\.\d+gb", k))


def _number(q):
    m = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", str(q))
    return float(m.group(1)) / (1000 if m.group(2) else 1) if m else None


def _capacity(name, g):
    """What one pod of a group brings into the Ray cluster, and how many pods there can be."""
    r = ((g["template"]["spec"].get("containers") or [{}])[0].get("resources")) or {}
    params, own = g.get("rayStartParams") or {}, {k.lower(): v for k, v in (g.get("resources") or {}).items()}
    limits = r.get("limits") or {}
    gpu = own.get("gpu") or params.get("num-gpus") or next((v for k, v in limits.items() if _is_gpu(k)), 0)
    cpu = own.get("cpu") or params.get("num-cpus") or limits.get("cpu") or (r.get("requests") or {}).get("cpu")
    labels = {"ray.io/node-group": "headgroup" if name == "head" else name} | (g.get("labels") or {})
    most = (
        1
        if name == "head"
        else (g["maxReplicas"] if g.get("maxReplicas") is not None else g.get("replicas", 1))
        * (g.get("numOfHosts") or 1)
    )
    return {
        "name": name,
        "GPU": _number(gpu),
        "CPU": -(-_number(cpu) // 1) if cpu is not None and _number(cpu) is not None else None,
        "labels": labels,
        "pods": most,
    }


def _selected(selector, labels):
    """Ray's label selector: value, !value, in(a,b), !in(a,b). Labels that Ray sets at run time always fit."""
    for k, want in (selector or {}).items():
        if k.startswith("ray.io/") and k not in labels:
            continue
        negative, want = str(want).startswith("!"), str(want).lstrip("!")
        values = [x.strip() for x in want[3:-1].split(",")] if want.startswith("in(") else [want]
        if (labels.get(k) in values) == negative:
            return False
    return True


def _placement(d, nodes):
    opts = d.get("ray_actor_options") or {}
    bundles = d.get("placement_group_bundles") or []
    selectors = [opts.get("label_selector")] + [
        f.get("label_selector") for f in opts.get("fallback_strategy") or []
    ]
    if d.get("placement_group_bundle_label_selector"):
        selectors = [d["placement_group_bundle_label_selector"][0]]
    where = [n for n in nodes if any(_selected(s, n["labels"]) for s in selectors)]
    label = f"deployment {d.get('name')}"
    if not where:
        yield f"serveConfigV2 {label}: no group has the labels {selectors[0]}"
        return
    if d.get("placement_group_strategy") == "STRICT_PACK" and bundles:
        needs = [{k: sum(b.get(k, 0) for b in bundles) for k in ("GPU", "CPU")}]
    elif bundles:
        needs = [{k: b.get(k, 0) for k in ("GPU", "CPU")} for b in bundles]
    elif opts:
        needs = [
            {"GPU": opts.get("num_gpus") or 0, "CPU": opts["num_cpus"] if opts.get("num_cpus") is not None else 1}
        ]
    else:
        return
    for need in needs:
        if not any(all(n[k] is None or n[k] >= need[k] for k in need) for n in where):
            yield (
                f"serveConfigV2 {label}: needs {need['GPU']:g} GPU and {need['CPU']:g} CPU in one pod; "
                + "; ".join(
                    f"{n['name']} has {n['GPU'] or 0:g} and {'unknown' if n['CPU'] is None else format(n['CPU'], 'g')}"
                    for n in where
                )
            )
            return
    scaling = d.get("autoscaling_config") or {}
    copies = scaling.get("min_replicas", 1) if scaling else d.get("num_replicas", 1)
    gpus = sum(n["GPU"] for n in needs)
    most = sum((n["GPU"] or 0) * n["pods"] for n in where)
    if isinstance(copies, int) and gpus and copies * gpus > most:
        yield f"serveConfigV2 {label}: {copies} replicas need {copies * gpus:g} GPUs; its groups have {most:g} at maxReplicas"


# --- links between objects ----------------------------------------------------------------------------


def all_pods(objs):
    """(labels, container ports, origin, least number) of every pod that the objects lead to. A label None stands for any value."""
    for o in objs:
        if o["kind"] == "RayService":
            for name, g in ray_groups(o["spec"]["rayClusterConfig"]):
                head = name == "head"
                labels = {
                    "app.kubernetes.io/name": "kuberay",
                    "app.kubernetes.io/created-by": "kuberay-operator",
                    "ray.io/identifier": None,
                    "ray.io/serve": None,
                }
                labels |= (g["template"].get("metadata") or {}).get("labels") or {}
                labels |= {
                    "ray.io/is-ray-node": "yes",
                    "ray.io/node-type": "head" if head else "worker",
                    "ray.io/group": "headgroup" if head else name,
                    "ray.io/cluster": None,
                }
                ports = {
                    p.get("name")
                    for c in g["template"]["spec"].get("containers") or []
                    for p in c.get("ports") or []
                } | {"metrics"}
                yield labels, ports, "ray", 1 if head else (g.get("minReplicas") or 0) * (g.get("numOfHosts") or 1)
        else:
            for _, meta, spec in core_pods(o):
                ports = {p.get("name") for c in spec.get("containers") or [] for p in c.get("ports") or []}
                yield meta.get("labels") or {}, ports, "core", 0


def matches(selector, labels):
    for k, v in (selector.get("matchLabels") or {}).items():
        if k not in labels or labels[k] not in (None, v):
            return False
    for e in selector.get("matchExpressions") or []:
        have, op = labels.get(e["key"]), e["operator"]
        if (op == "Exists" and e["key"] not in labels) or (op == "DoesNotExist" and e["key"] in labels):
            return False
        if (
            have is not None
            and ((op == "In" and have not in e["values"]) or (op == "NotIn" and have in e["values"]))
        ) or (op == "In" and e["key"] not in labels):
            return False
    return True


def links(objs):
    pods = list(all_pods(objs))
    services = {}
    for o in objs:
        if o["kind"] == "Service":
            services[o["metadata"]["name"]] = {
                x for p in o["spec"].get("ports") or [] for x in (p.get("name"), p["port"])
            }
        if o["kind"] == "RayService":
            s, n = o["spec"], o["metadata"]["name"]
            head = {
                p.get("name"): p["containerPort"]
                for p in (s["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].get("containers") or [{}])[
                    0
                ].get("ports")
                or []
            }
            serve = {k: v for k, v in head.items() if k == "serve" or (k or "").startswith("serve-")}
            services[f"{n}-head-svc"] = set(head) | set(head.values())
            if (s.get("upgradeStrategy") or {}).get("type") != "NewClusterWithIncrementalUpgrade":
                own = s.get("serveService") or {}
                mine = {
                    p.get("name"): p["port"]
                    for p in (own.get("spec") or {}).get("ports") or []
                    if p.get("name") in serve
                }
                services[(own.get("metadata") or {}).get("name") or f"{n}-serve-svc"] = set(serve) | set(
                    (serve | mine).values()
                )
    for o in objs:
        s, where = o.get("spec") or {}, name_of(o)
        selector = {
            "PodDisruptionBudget": s.get("selector"),
            "NetworkPolicy": s.get("podSelector"),
            "PodMonitor": s.get("selector"),
            "Service": {"matchLabels": s["selector"]} if o["kind"] == "Service" and s.get("selector") else None,
        }.get(o["kind"])
        hit = [p for p in pods if selector is not None and matches(selector, p[0])]
        if selector is not None and not hit:
            yield f"{where}: its selector matches no pod of this manifest"
        if o["kind"] == "PodDisruptionBudget" and any(p[2] == "ray" for p in hit):
            least = s.get("minAvailable")
            if not isinstance(least, int):
                yield f"{where}: RayCluster has no scale subresource: only an integer minAvailable works for Ray pods"
            elif least > sum(p[3] for p in hit if p[2] == "ray"):
                yield f"{where}: minAvailable {least} is more than the {sum(p[3] for p in hit)} pods that there are at least"
        if o["kind"] == "PodMonitor" and hit:
            for e in s.get("podMetricsEndpoints") or []:
                if e.get("port") and not any(e["port"] in p[1] for p in hit):
                    yield f"{where}: no selected pod has a port named {e['port']}"
        for svc, port in _backends(o):
            if svc not in services:
                yield f"{where}: backend Service {svc} does not exist (there are: {', '.join(sorted(services)) or 'none'})"
            elif port is not None and port not in services[svc]:
                yield f"{where}: Service {svc} has no port {port}"


def _backends(o):
    s = o.get("spec") or {}
    if o["kind"] == "Ingress":
        for b in [s.get("defaultBackend") or {}] + [
            p["backend"] for r in s.get("rules") or [] for p in (r.get("http") or {}).get("paths") or []
        ]:
            if b.get("service"):
                port = b["service"].get("port") or {}
                yield b["service"]["name"], port.get("name", port.get("number"))
    elif o["kind"] in ("HTTPRoute", "GRPCRoute"):
        for r in s.get("rules") or []:
            for b in r.get("backendRefs") or []:
                if b.get("kind", "Service") == "Service" and "namespace" not in b:
                    yield b["name"], b.get("port")


# --- PromQL ---------------------------------------------------------------------------------------------


def promtool(groups, where):
    """Complaints of `promtool check rules` about rule groups."""
    if not shutil.which("promtool"):
        raise CannotRun(
            "promtool is not on PATH (Debian's package prometheus has it); --no-promtool leaves PromQL unchecked"
        )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as f:
        yaml.safe_dump({"groups": groups}, f)
        f.flush()
        r = subprocess.run(["promtool", "check", "rules", f.name], capture_output=True, text=True)
        if r.returncode:
            yield f"{where}: {' '.join((r.stderr or r.stdout).replace(f.name, 'rules').split())[:400]}"


def _panels(node):
    for p in node.get("panels") or []:
        yield p
        yield from _panels(p)


def _no_variables(expr):
    """PromQL with Grafana's variables filled in."""
    var = r"\$\{[^}]*\}|\[\[[^\]]*\]\]|\$\w+"
    expr = re.sub(r"\[(?!\[)([^\]]*)\]", lambda m: f"[{re.sub(var, '1m', m.group(1))}]", expr)
    return re.sub(var, "1", expr)


def prom_rules(o):
    if o["kind"] == "PrometheusRule" and (o.get("spec") or {}).get("groups"):
        yield from promtool(o["spec"]["groups"], "spec.groups")
    if o["kind"] == "ConfigMap":
        for k, text in (o.get("data") or {}).items():
            if not k.endswith(".json"):
                continue
            try:
                d = json.loads(text)
            except ValueError as e:
                yield f"data.{k}: not JSON: {e}"
                continue
            if isinstance(d, dict) and "panels" in d:
                exprs = [t["expr"] for p in _panels(d) for t in p.get("targets") or [] if t.get("expr")]
                if exprs:
                    yield from promtool(
                        [
                            {
                                "name": k,
                                "rules": [
                                    {"record": f"panel:{i}", "expr": _no_variables(e)} for i, e in enumerate(exprs)
                                ],
                            }
                        ],
                        f"data.{k}",
                    )


# --- all together ---------------------------------------------------------------------------------------


def check_object(o, crds=CRDS, kube=KUBE):
    """Complaints about one object by itself (what an API server and the operator would say)."""
    errs, key = [], (o["apiVersion"], o["kind"])
    errs += meta_ok(o)
    if key in load_crds(crds):
        errs += [
            f"{'.'.join(map(str, e.absolute_path)) or 'object'}: {e.message[:200]}"
            for e in _validator(crds, key).iter_errors(o)
        ]
        if not errs:
            schema = load_crds(crds)[key].schema
            errs += schema_rules(schema, defaulted(schema, copy.deepcopy(o)))
    else:
        try:
            kubernetes_validate.validate(o, kube, strict=True)
        except kubernetes_validate.ValidationError as e:
            errs.append(f"{'.'.join(map(str, e.absolute_path)) or 'object'}: {e.message[:200]}")
        except kubernetes_validate.SchemaNotFoundError:
            errs.append(
                f"no schema for {key[0]} {key[1]} (not in Kubernetes {kube}, and no CRD in {pathlib.Path(crds).name}/)"
            )
        except kubernetes_validate.VersionNotSupportedError as e:
            raise CannotRun(f"kubernetes-validate has no schemas for Kubernetes {kube}") from e
    if o["kind"] != "ConfigMap":
        errs += enums(o.get("spec") or {}, "spec")
    if not errs:  # these need a well-formed object
        for path, meta, spec in core_pods(o):
            errs += labels_ok(meta.get("labels"), f"{path}.labels")
            errs += pod_rules(spec, path)
        if o["kind"] == "PersistentVolumeClaim":
            errs += quantities((o.get("spec") or {}).get("resources"), "spec.resources")
        if o["kind"] == "RayService":
            errs += kuberay_rules(o)
    return errs


def check(objs, crds=CRDS, kube=KUBE, prom=True):
    """Complaints about a whole manifest."""
    errs, seen, sound = [], set(), []
    for o in objs:
        where = name_of(o)
        key = (o["apiVersion"].split("/")[0], where, o["metadata"].get("namespace"))
        if key in seen:
            errs.append(f"{where}: twice in the manifest")
        seen.add(key)
        mine = check_object(o, crds, kube)
        if not mine and prom:
            mine += prom_rules(o)
        errs += [f"{where}: {e}" for e in mine]
        sound += [o] if not mine else []
    if len(sound) == len(objs):
        errs += links(objs)
    return errs


def check_text(text: str, crds: pathlib.Path = CRDS, kube: str = KUBE, prom: bool = True) -> list[str]:
    objs, errs = parse(text)
    return errs or check(objs, crds, kube, prom)


def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("files", nargs="+", metavar="FILE", help="rendered manifest; - is standard input")
    ap.add_argument(
        "--crds",
        default=str(CRDS),
        metavar="DIR",
        help="folder of CRDs (default: $BAKEHOUSE_CRDS, else crds/ beside this script)",
    )
    ap.add_argument(
        "--kube", default=KUBE, metavar="X.Y", help=f"Kubernetes version of the core schemas (default {KUBE})"
    )
    ap.add_argument("--no-promtool", action="store_true", help="do not check PromQL")
    ap.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help="drop complaints that match (say why where you use it)",
    )
    ap.add_argument(
        "-v", "--verbose", action="store_true", help="also name the CEL rules that could not be evaluated"
    )
    a = ap.parse_args(argv)
    try:
        ignore = [re.compile(x) for x in a.ignore]
        objs, errs = [], []
        for f in a.files:
            more, bad = parse(
                sys.stdin.read() if f == "-" else pathlib.Path(f).read_text(), "standard input" if f == "-" else f
            )
            objs += more
            errs += bad
        errs += check(objs, a.crds, a.kube, not a.no_promtool) if not errs else []
    except (CannotRun, OSError, UnicodeDecodeError, re.error) as e:
        print(f"chartcheck: {e}", file=sys.stderr)
        return 2
    dropped = [e for e in errs if any(r.search(e) for r in ignore)]
    errs = [e for e in errs if e not in dropped]
    for e in errs:
        print(e)
    for e in dropped:
        print(f"ignored: {e}", file=sys.stderr)
    if a.verbose:
        for path, rule, why in CEL_NOT_RUN:
            print(f"CEL rule not evaluated: {path}: {rule[:80]}: {why[:100]}", file=sys.stderr)
    if not errs:
        print(
            f"{len(objs)} objects ok: {', '.join(f'{n} {k}' for k, n in sorted(collections.Counter(o['kind'] for o in objs).items()))}"
        )
    return int(bool(errs))


if __name__ == "__main__":
    sys.exit(main())
