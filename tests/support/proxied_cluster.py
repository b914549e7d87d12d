"""The application behind Serve's own proxies, in a plain Ray without direct ingress, as `serve run` would have it.

A process of its own, because Serve reads its environment once, when it is imported: says `ready`, and ends when
its input does.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from servers import free_port, wait_until


@contextmanager
def running(model: str, name: str) -> Iterator[tuple[str, str]]:
    """The addresses of HTTP and gRPC."""
    http_port, grpc_port = free_port(), free_port()
    process = subprocess.Popen(
        [sys.executable, __file__, model, name, str(http_port), str(grpc_port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert "ready\n" in iter(process.stdout.readline, "")
        url = f"http://127.0.0.1:{http_port}"
        wait_until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 200, 60, "ready")
        yield url, f"127.0.0.1:{grpc_port}"
    finally:
        process.stdin.close()
        process.wait(timeout=120)
        process.stdout.close()


def main(model: str, name: str, http_port: int, grpc_port: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="proxied-"))
    token_path = folder / "token"
    token_path.write_text("0" * 64)
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    import ray
    from bakehouse_cluster.app import build
    from bakehouse_cluster.config import parse_config
    from bakehouse_cluster.guard import end_all
    from bakehouse_cluster.serve_environment import GRPC_SERVICES
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    n_cpus = os.cpu_count() or 1
    config = parse_config({"model": {"source": model, "served_name": name}}).shared_out(n_cpus)
    ray.init(address="local", num_cpus=n_cpus, log_to_driver=False, _temp_dir=str(folder))
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=http_port),
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[GRPC_SERVICES]),
    )
    serve.run(build(config), name="bakehouse")
    print("ready", flush=True)
    sys.stdin.read()
    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    end_all(folder, started)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
