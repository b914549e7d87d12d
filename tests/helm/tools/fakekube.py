#!/usr/bin/env python3
"""A small stand-in for a Kubernetes API server, on loopback only, for helm and kubectl.

    fakekube.py -- sh -c 'helm install demo helm -n llm && kubectl get rayservices'
    fakekube.py --port 18080 --kubeconfig kubeconfig.yaml      # until Ctrl-C

It knows discovery, create, get, list with label selectors, server-side apply, merge patch, delete,
dry run, and helm's release Secrets. Every write is checked by chartcheck.check_object and refused
with 422 as an API server with fieldValidation=Strict and the KubeRay operator would refuse it.
metadata.generation counts the changes of an object outside metadata and status.

It has no controllers, no watch, no field ownership, no admission, no RBAC: nothing ever becomes
ready, so helm --wait and hooks with Jobs cannot work. Objects are in memory and gone at the end.

With a command after --, the command runs with KUBECONFIG (and cache folders of helm and kubectl in a
temporary folder) and its exit status is the script's. From Python:

    with fakekube.FakeKube() as kube:
        subprocess.run(["helm", "install", "demo", "helm", "-n", "llm"], env=kube.env(), check=True)
        kube.get("RayService", "llm", "demo")
"""

import argparse
import base64
import copy
import http.server
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing
import urllib.parse
import uuid

import chartcheck
import yaml

CORE = {  # groupVersion: [(plural, kind, namespaced)]
    "v1": [
        ("namespaces", "Namespace", False),
        ("secrets", "Secret", True),
        ("configmaps", "ConfigMap", True),
        ("services", "Service", True),
        ("serviceaccounts", "ServiceAccount", True),
        ("persistentvolumeclaims", "PersistentVolumeClaim", True),
        ("pods", "Pod", True),
    ],
    "apps/v1": [
        ("deployments", "Deployment", True),
        ("statefulsets", "StatefulSet", True),
        ("daemonsets", "DaemonSet", True),
    ],
    "batch/v1": [("jobs", "Job", True), ("cronjobs", "CronJob", True)],
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget", True)],
    "autoscaling/v2": [("horizontalpodautoscalers", "HorizontalPodAutoscaler", True)],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy", True), ("ingresses", "Ingress", True)],
    "rbac.authorization.k8s.io/v1": [
        ("roles", "Role", True),
        ("rolebindings", "RoleBinding", True),
        ("clusterroles", "ClusterRole", False),
        ("clusterrolebindings", "ClusterRoleBinding", False),
    ],
    "scheduling.k8s.io/v1": [("priorityclasses", "PriorityClass", False)],
    "storage.k8s.io/v1": [("storageclasses", "StorageClass", False)],
}
SHORT = {
    "persistentvolumeclaims": ["pvc"],
    "poddisruptionbudgets": ["pdb"],
    "configmaps": ["cm"],
    "services": ["svc"],
    "ingresses": ["ing"],
    "networkpolicies": ["netpol"],
}
SERVER_FIELDS = ("managedFields", "uid", "resourceVersion", "creationTimestamp", "generation", "selfLink")


def protobuf(buf):
    """[(field number, value)] of one protobuf message."""
    i, out = 0, []

    def varint():
        nonlocal i
        r = shift = 0
        while True:
            b = buf[i]
            i, r, shift = i + 1, r | (b & 127) << shift, shift + 7
            if b < 128:
                return r

    while i < len(buf):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            v = varint()
        else:
            n = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            v, i = buf[i : i + n], i + n
        out.append((tag >> 3, v))
    return out


def from_protobuf(buf):
    """Secret or ConfigMap as helm's release storage sends it (client-go's typed clients speak protobuf)."""
    outer = dict(protobuf(buf[4:]))
    what = {k: v.decode() for k, v in protobuf(outer[1])}
    obj = protobuf(outer[2])
    meta = protobuf(dict(obj)[1])

    def table(fields, n):
        return {dict(protobuf(v))[1].decode(): dict(protobuf(v)).get(2, b"") for k, v in fields if k == n}

    def text(t):
        return {k: v.decode() for k, v in t.items()}

    r = {
        "apiVersion": what[1],
        "kind": what[2],
        "metadata": {
            "name": dict(meta)[1].decode(),
            "labels": text(table(meta, 11)),
            "annotations": text(table(meta, 12)),
        },
    }
    secret = what[2] == "Secret"
    r["data"] = {k: base64.b64encode(v).decode() if secret else v.decode() for k, v in table(obj, 2).items()}
    if secret and 3 in dict(obj):
        r["type"] = dict(obj)[3].decode()
    return r


def merge(a, b):
    """JSON merge patch."""
    for k, v in b.items():
        if v is None:
            a.pop(k, None)
        elif isinstance(v, dict) and isinstance(a.get(k), dict):
            merge(a[k], v)
        else:
            a[k] = v
    return a


def directives(v):
    """Does a strategic merge patch contain what a plain merge cannot do?"""
    if isinstance(v, dict):
        return any(k.startswith("$") for k in v) or any(directives(x) for x in v.values())
    return isinstance(v, list) and any(directives(x) for x in v)


class Refused(Exception):
    def __init__(self, code, reason, message, **details):
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
            "details": details,
        }
        self.code = code


class FakeKube:
    def __init__(
        self,
        crds: pathlib.Path = chartcheck.CRDS,
        port: int = 0,
        namespaces: tuple[str, ...] = ("default", "llm"),
        kube: str = chartcheck.KUBE,
        log: typing.TextIO | None = None,
    ) -> None:
        self.crds, self.kube, self.log = crds, kube, log
        self.kinds = {gv: list(v) for gv, v in CORE.items()}
        for (gv, kind), c in chartcheck.load_crds(crds).items():
            self.kinds.setdefault(gv, []).append((c.plural, kind, c.namespaced))
        self.db, self.rv, self.lock = {}, 100, threading.Lock()  # (groupVersion, plural, namespace, name): object
        for n in namespaces:
            self.db["v1", "namespaces", "", n] = {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": n, "uid": str(uuid.uuid4()), "generation": 1, "resourceVersion": "1"},
            }
        handler = type("Handler", (Handler,), {"kube": self})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.folder = None

    # -- life

    def __enter__(self) -> typing.Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.folder = tempfile.TemporaryDirectory(prefix="fakekube-")
        self.write_kubeconfig(pathlib.Path(self.folder.name, "kubeconfig"))
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()

    def write_kubeconfig(self, path, namespace="llm"):
        pathlib.Path(path).write_text(
            json.dumps(
                {  # JSON is YAML
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "fake",
                    "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                    "users": [{"name": "nobody", "user": {"token": "none"}}],
                    "contexts": [
                        {"name": "fake", "context": {"cluster": "fake", "user": "nobody", "namespace": namespace}}
                    ],
                }
            )
        )

    def env(self) -> dict[str, str]:
        """Environment for helm and kubectl: this server, and no file of theirs outside the temporary folder."""
        f = self.folder.name
        return os.environ | {
            "KUBECONFIG": f"{f}/kubeconfig",
            "KUBECACHEDIR": f"{f}/kube",
            "HELM_CACHE_HOME": f"{f}/helm",
            "HELM_CONFIG_HOME": f"{f}/helm",
            "HELM_DATA_HOME": f"{f}/helm",
        }

    def get(self, kind: str, namespace: str, name: str) -> dict[str, typing.Any] | None:
        """A copy of one stored object, or None."""
        with self.lock:
            return next(
                (
                    copy.deepcopy(o)
                    for (_, _, ns, n), o in self.db.items()
                    if (o["kind"], ns, n) == (kind, namespace, name)
                ),
                None,
            )

    def names(self) -> list[str]:
        """Sorted kind/name of all that is stored, without namespaces."""
        with self.lock:
            return sorted(chartcheck.name_of(o) for o in self.db.values() if o["kind"] != "Namespace")

    # -- requests

    def answer(self, method, path, content_type, body):
        u = urllib.parse.urlparse(path)
        q = {k: v[0] for k, v in urllib.parse.parse_qs(u.query).items()}
        s = u.path.strip("/").split("/")
        if s[0] in ("version", "openapi") or s in (["api"], ["apis"]):
            return 200, self.discovery(s)
        if s[0] not in ("api", "apis"):
            raise Refused(404, "NotFound", f"no {u.path}")
        gv, s = ("v1", s[2:]) if s[0] == "api" else ("/".join(s[1:3]), s[3:])
        if gv not in self.kinds:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if not s:
            return 200, {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": gv,
                "resources": [
                    {
                        "name": p,
                        "singularName": k.lower(),
                        "namespaced": n,
                        "kind": k,
                        "shortNames": SHORT.get(p, []),
                        "verbs": ["create", "delete", "get", "list", "patch", "update"],
                    }
                    for p, k, n in self.kinds[gv]
                ],
            }
        ns = ""
        if s[0] == "namespaces" and len(s) > 2:
            ns, s = s[1], s[2:]
        plural, name = s[0], s[1] if len(s) > 1 else None
        kind = next((k for p, k, _ in self.kinds[gv] if p == plural), None)
        if not kind or len(s) > 2:
            raise Refused(404, "NotFound", f"no {'/'.join(s)} in {gv}")
        if method == "GET":
            return 200, self.read(gv, plural, kind, ns, name, q)
        if method == "DELETE":
            return 200, self.delete(gv, plural, ns, name, q)
        return self.write(method, gv, plural, kind, ns, name, q, content_type, body)

    def discovery(self, s):
        def where(gv):
            return ("api/" if gv == "v1" else "apis/") + gv

        if s == ["version"]:
            major, minor = self.kube.split(".")[:2]
            return {"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.0", "platform": "linux/amd64"}
        if s == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if s == ["apis"]:
            groups = {}
            for gv in self.kinds:
                if "/" in gv:
                    groups.setdefault(gv.split("/")[0], []).append(
                        {"groupVersion": gv, "version": gv.split("/")[1]}
                    )
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [{"name": k, "versions": v, "preferredVersion": v[0]} for k, v in groups.items()],
            }
        if s == ["openapi", "v3"]:
            return {"paths": {where(gv): {"serverRelativeURL": "/openapi/v3/" + where(gv)} for gv in self.kinds}}
        gv = "/".join(s[3:])
        if s[:2] != ["openapi", "v3"] or gv not in self.kinds:
            raise Refused(404, "NotFound", "no such OpenAPI document")
        group, ver = (
            gv.split("/") if "/" in gv else ("", gv)
        )  # enough for clients to see that the server validates fields
        return {
            "openapi": "3.0.0",
            "info": {"title": gv, "version": "1"},
            "paths": {
                f"/{where(gv)}/{'namespaces/{namespace}/' if n else ''}{p}/{{name}}": {
                    "patch": {
                        "x-kubernetes-action": "patch",
                        "x-kubernetes-group-version-kind": {"group": group, "version": ver, "kind": k},
                        "parameters": [
                            {"name": x, "in": "query", "schema": {"type": "string"}}
                            for x in ("dryRun", "fieldValidation", "fieldManager")
                        ],
                        "responses": {"200": {"description": "OK"}},
                    }
                }
                for p, k, n in self.kinds[gv]
            },
        }

    def read(self, gv, plural, kind, ns, name, q):
        if q.get("watch") in ("1", "true"):
            raise Refused(405, "MethodNotAllowed", "fakekube has no watch (so no helm --wait)")
        if name:
            if (gv, plural, ns, name) not in self.db:
                raise Refused(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural)
            return self.db[gv, plural, ns, name]
        items = [
            o
            for (g, p, n, _), o in self.db.items()
            if (g, p) == (gv, plural) and ns in ("", n) and self.selected(o, q.get("labelSelector", ""))
        ]
        return {
            "kind": kind + "List",
            "apiVersion": gv,
            "metadata": {"resourceVersion": str(self.rv)},
            "items": items,
        }

    @staticmethod
    def selected(o, selector):
        labels = o["metadata"].get("labels") or {}
        for term in re.split(r",(?![^(]*\))", selector) if selector else []:
            m = re.fullmatch(r"\s*(\S+?)\s*(?:(==|=|!=)\s*(\S*)|(in|notin)\s*\((.*)\))?\s*", term)
            if not m:
                raise Refused(400, "BadRequest", f"label selector {term!r}")
            key, op, value = (
                m.group(1),
                m.group(2) or m.group(4),
                [m.group(3)] if m.group(2) else [x.strip() for x in (m.group(5) or "").split(",")],
            )
            if not op:
                ok = (key.lstrip("!") in labels) != key.startswith("!")
            else:
                ok = (labels.get(key) in value) == (op in ("=", "==", "in"))
            if not ok:
                return False
        return True

    def delete(self, gv, plural, ns, name, q):
        if not name:
            raise Refused(405, "MethodNotAllowed", "fakekube deletes one object at a time")
        key = (gv, plural, ns, name)
        if key not in self.db:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural)
        return self.db[key] if q.get("dryRun") == "All" else self.db.pop(key)

    def write(self, method, gv, plural, kind, ns, name, q, content_type, body):
        if not isinstance(body, dict):
            raise Refused(400, "BadRequest", "the body is not an object")
        if method == "POST":
            name = (body.get("metadata") or {}).get("name")
        key, old = (gv, plural, ns, name), self.db.get((gv, plural, ns, name))
        if ns and ("v1", "namespaces", "", ns) not in self.db:
            raise Refused(404, "NotFound", f'namespaces "{ns}" not found', name=ns, kind="namespaces")
        if method == "POST":
            if old:
                raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists', name=name, kind=plural)
            new = body
        elif method == "PUT" or "apply-patch" in content_type:
            if method == "PUT" and not old:
                raise Refused(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural)
            new = body
        elif not old:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural)
        elif "merge-patch" in content_type and not ("strategic" in content_type and directives(body)):
            new = merge(copy.deepcopy(old), body)
        else:
            raise Refused(
                415,
                "UnsupportedMediaType",
                f"fakekube cannot do this patch ({content_type}); use server-side apply",
            )
        new.setdefault("apiVersion", gv)
        new.setdefault("kind", kind)
        clean = copy.deepcopy(new)
        for k in SERVER_FIELDS:
            clean.get("metadata", {}).pop(k, None)
        clean.pop("status", None)
        if not (clean.get("metadata") or {}).get("name"):
            raise Refused(422, "Invalid", f"{kind}: metadata.name is required")
        errs = chartcheck.check_object(clean, self.crds, self.kube)
        if errs:
            raise Refused(
                422,
                "Invalid",
                f'{kind}.{gv} "{name}" is invalid: ' + "; ".join(errs[:5]),
                name=name,
                kind=kind,
                causes=[
                    {
                        "reason": "FieldValueInvalid",
                        "field": e.partition(": ")[0],
                        "message": e.partition(": ")[2] or e,
                    }
                    for e in errs
                ],
            )
        meta = new["metadata"]
        if ns:
            meta["namespace"] = ns

        def spec(o):
            return {k: v for k, v in o.items() if k not in ("metadata", "status")}

        meta["uid"] = old["metadata"]["uid"] if old else str(uuid.uuid4())
        meta["creationTimestamp"] = (old or {}).get("metadata", {}).get("creationTimestamp") or time.strftime(
            "%Y-%m-%dT%H:%M:%SZ", time.gmtime()
        )
        meta["generation"] = old["metadata"]["generation"] + (spec(old) != spec(new)) if old else 1
        if q.get("dryRun") != "All":
            self.rv += 1
            self.db[key] = new
        meta["resourceVersion"] = str(self.rv)
        return (200 if old else 201), new


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    kube = None

    def log_message(self, form, *args):
        if self.kube.log:
            print(time.strftime("%H:%M:%S"), form % args, file=self.kube.log, flush=True)

    def respond(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = None
            if raw and self.command != "DELETE":
                body = from_protobuf(raw) if raw[:4] == b"k8s\0" else yaml.load(raw, chartcheck.Loader)
            with self.kube.lock:
                code, out = self.kube.answer(self.command, self.path, self.headers.get("Content-Type", ""), body)
                data = json.dumps(out).encode()
        except Refused as e:
            code, data = e.code, json.dumps(e.status).encode()
        except (yaml.YAMLError, KeyError, IndexError, UnicodeDecodeError) as e:
            code, data = (
                400,
                json.dumps(Refused(400, "BadRequest", f"cannot read the body: {e!r}").status).encode(),
            )
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = respond


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
    ap.add_argument(
        "--crds",
        default=str(chartcheck.CRDS),
        metavar="DIR",
        help="folder of CRDs (default: $BAKEHOUSE_CRDS, else crds/ beside this script)",
    )
    ap.add_argument(
        "--kube",
        default=chartcheck.KUBE,
        metavar="X.Y",
        help=f"Kubernetes version to claim and to check by (default {chartcheck.KUBE})",
    )
    ap.add_argument(
        "--namespace",
        action="append",
        metavar="NAME",
        help="namespace that exists from the start (default: default and llm)",
    )
    ap.add_argument("--kubeconfig", metavar="FILE", help="also write a kubeconfig here")
    ap.add_argument("--log", metavar="FILE", help="write one line a request here (- is standard error)")
    ap.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="run this against the server, then stop"
    )
    a = ap.parse_args()
    command = a.command[1:] if a.command[:1] == ["--"] else a.command
    try:
        log = sys.stderr if a.log == "-" else open(a.log, "w") if a.log else None  # noqa: SIM115  # until the process ends
        kube = FakeKube(a.crds, a.port, a.namespace or ("default", "llm"), a.kube, log)
    except (OSError, chartcheck.CannotRun) as e:
        print(f"fakekube: {e}", file=sys.stderr)
        return 2
    with kube:
        if a.kubeconfig:
            kube.write_kubeconfig(a.kubeconfig, (a.namespace or ["llm"])[0])
        if command:
            try:
                return subprocess.run(command, env=kube.env()).returncode
            except OSError as e:
                print(f"fakekube: {e}", file=sys.stderr)
                return 2
        print(f"listening on {kube.url}; KUBECONFIG={a.kubeconfig or kube.env()['KUBECONFIG']}", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
