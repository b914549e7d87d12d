"""A server with its faces for HTTP and gRPC."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from collector import Collector
from servers import Server, free_port, running

MODEL = "scripted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faces:
    """A server and where its faces are."""

    url: str
    grpc_address: str
    server: Server | None = None
    collector: Collector | None = None

    def n_held_blocks(self) -> int:
        replicas = httpx.get(f"{self.url}/health", timeout=60).json()["replicas"]
        return sum(int(replica["load"]["n_held_blocks"]) for replica in replicas)


@contextmanager
def served(folder: Path, model: str, collector: Collector | None = None) -> Iterator[Faces]:
    """Traces where there is a collector."""
    port = free_port()
    options = ["--served-model-name", MODEL, "--grpc-port", str(port)]
    if collector is not None:
        tracing = {"enabled": True, "exporter": "otlp", "endpoint": collector.endpoint}
        config = folder / "config.yaml"
        config.write_text(json.dumps({"tracing": tracing}))
        options += ["--config", str(config)]
    with running(folder / "log", model, *options) as server:
        yield Faces(url=server.url, grpc_address=f"127.0.0.1:{port}", server=server, collector=collector)
