#!/usr/bin/env python3
"""Install, upgrade, roll back and uninstall a chart with the real helm against fakekube.

    chart_lifecycle.py helm -f helm/ci/full-values.yaml --refuse upgrade.type=Rolling

Steps, each of which must hold:
  1 helm install succeeds
  2 an upgrade that changes nothing but the chart's version leaves the RayService's spec as it is
    (in rayClusterConfig a change would start a second GPU cluster)
  3 an upgrade with each --refuse KEY=VALUE fails, by values.schema.json, a template's fail or the
    server, and leaves the RayService as it is
  4 kubectl apply --server-side --dry-run=server refuses a RayService with an unknown field
  5 helm rollback to revision 1 succeeds and leaves the RayService's spec as installed
  6 helm uninstall leaves only objects annotated helm.sh/resource-policy: keep

helm and kubectl are taken from --bin, else .tools/bin, else PATH (see get_helm.py). The chart is copied
to a temporary folder first. Exit status: 0 all hold, 1 one does not, 2 it could not run.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import fakekube


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("chart", metavar="CHART", help="folder of the chart")
    ap.add_argument("-f", "--values", action="append", default=[], metavar="FILE")
    ap.add_argument(
        "--refuse", action="append", default=[], metavar="KEY=VALUE", help="a value that an upgrade must refuse"
    )
    ap.add_argument("--name", default="demo", help="release name (default demo)")
    ap.add_argument("--namespace", default="llm", help="namespace (default llm)")
    ap.add_argument(
        "--bin",
        default=".tools/bin",
        metavar="DIR",
        help="folder of helm and kubectl (default .tools/bin, then PATH)",
    )
    a = ap.parse_args()
    path = f"{a.bin}{os.pathsep}{os.environ.get('PATH', '')}"
    tools = {n: shutil.which(n, path=path) for n in ("helm", "kubectl")}
    meta = pathlib.Path(a.chart, "Chart.yaml")
    lacking = [n for n, p in tools.items() if not p] + [
        str(p) for p in [meta, *map(pathlib.Path, a.values)] if not p.is_file()
    ]
    if lacking:
        print(f"chart_lifecycle: not found: {', '.join(lacking)}", file=sys.stderr)
        return 2
    failed = []

    def step(ok, text, detail=""):
        print(
            f"{'ok    ' if ok else 'FAILED'} {text}" + (f": {detail.strip()[-600:]}" if detail and not ok else ""),
            flush=True,
        )
        failed.extend([] if ok else [text])
        return ok

    with fakekube.FakeKube(namespaces=("default", a.namespace)) as kube, tempfile.TemporaryDirectory() as t:
        chart = pathlib.Path(shutil.copytree(a.chart, pathlib.Path(t, "chart")))

        def run(tool, *args, stdin=None):
            r = subprocess.run(
                [tools[tool], *map(str, args), "--namespace", a.namespace],
                env=kube.env(),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=120,
            )
            return r.returncode, r.stdout + r.stderr

        def service():
            """(name, generation) of the RayServices."""
            with kube.lock:
                return sorted(
                    (o["metadata"]["name"], o["metadata"]["generation"])
                    for o in kube.db.values()
                    if o["kind"] == "RayService"
                )

        values = [x for f in a.values for x in ("-f", f)]
        rc, out = run("helm", "install", a.name, chart, *values)
        if not step(rc == 0 and bool(service()), "install", out or "no RayService in the chart"):
            return 1
        first = service()
        installed = kube.get("RayService", a.namespace, first[0][0])

        text = (chart / "Chart.yaml").read_text()
        (chart / "Chart.yaml").write_text(re.sub(r"(?m)^version:.*$", "version: 999.0.0", text))
        rc, out = run("helm", "upgrade", a.name, chart, *values)
        step(
            rc == 0 and service() == first,
            "an upgrade of the chart's version leaves the RayService alone",
            out if rc else f"its spec changed: {first} -> {service()}",
        )

        for bad in a.refuse:
            before = service()
            rc, out = run("helm", "upgrade", a.name, chart, *values, "--set", bad)
            step(
                rc != 0 and service() == before,
                f"upgrade with {bad} is refused",
                "it was accepted" if rc == 0 else "it changed the RayService",
            )

        broken = json.loads(json.dumps(installed))
        broken["spec"]["noSuchField"] = 1
        for k in ("managedFields", "resourceVersion", "uid", "generation", "creationTimestamp"):
            broken["metadata"].pop(k, None)
        rc, out = run(
            "kubectl",
            "apply",
            "--server-side",
            "--dry-run=server",
            "--force-conflicts",
            "-f",
            "-",
            stdin=json.dumps(broken),
        )
        step(rc != 0 and "noSuchField" in out, "kubectl --dry-run=server refuses an unknown field", out)

        rc, out = run("helm", "rollback", a.name, 1)
        now = kube.get("RayService", a.namespace, first[0][0])
        step(
            rc == 0 and now and now["spec"] == installed["spec"],
            "rollback to revision 1",
            out or "its spec differs",
        )

        rc, out = run("helm", "uninstall", a.name)
        with kube.lock:
            left = [
                f"{o['kind']}/{o['metadata']['name']}"
                for o in kube.db.values()
                if o["kind"] != "Namespace"
                and (o["metadata"].get("annotations") or {}).get("helm.sh/resource-policy") != "keep"
            ]
        step(
            rc == 0 and not left,
            f"uninstall (kept: {', '.join(kube.names()) or 'nothing'})",
            out if rc else f"left over: {', '.join(left)}",
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
