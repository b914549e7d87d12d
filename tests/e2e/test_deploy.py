"""The chart's minimal example, deployed by `serve deploy` on a Ray that is started as in a cluster.

The document is the chart's `serveConfigV2`, to the letter. On top of the example are ports, since others may have
the usual ones here, one of them for gRPC; and pools, so that Ray is asked for their labels.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from bakehouse_router.proto import inference_pb2 as pb
from bakehouse_router.proto.inference_pb2_grpc import InferenceStub
from charts import Helm, real_helm, serve_text
from servers import free_port, wait_until
from started_ray import StartedRay, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LOAVES, ROLLS = (
    {"name": name, "minReplicas": 1, "maxReplicas": 1, "resources": {"requests": {"cpu": "2", "memory": "6Gi"}}}
    for name in ("loaves", "rolls")
)
POOLS = (
    f"pools={json.dumps([LOAVES, ROLLS])}",
    "config.replica.pools={loaves,rolls}",
    "config.gateway.pools={loaves}",
)
APPLY_TIMEOUT_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A minimal release, and where it is served."""

    ray: StartedRay
    helm: Helm
    folder: Path
    port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def change(self, *sets: str) -> None:
        """Deploy the release with these values on top."""
        ports = (f"config.server.port={self.port}", f"config.server.grpc_port={self.grpc_port}")
        document = self.folder / "serve.yaml"
        document.write_text(serve_text(self.helm.objects("minimal-cpu", *ports, *POOLS, *sets)))
        self.ray.deploy(document)

    def status_of(self, **fields: object) -> int:
        """How a completion of these fields is answered."""
        return httpx.post(f"{self.url}/v1/completions", json=body(**fields), timeout=60).status_code


def body(**fields: object) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "Bread is", "temperature": 0, "max_tokens": 8, **fields}


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=60).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """The default model on one CPU, in nodes of a pool, of which there is one."""
    folder = tmp_path_factory.mktemp("deploy")
    helm = real_helm("4")
    with started(folder / "ray.log", labels="bakehouse/pool=loaves") as ray:
        deployed = Deployed(ray=ray, helm=helm, folder=folder, port=free_port(), grpc_port=free_port())
        deployed.change()
        ray.wait_until_running()
        wait_until(lambda: answers(deployed.url), 60, "ready")
        yield deployed


async def test_it_answers_over_http_and_over_grpc_alike(deployed: Deployed) -> None:
    answer = httpx.post(f"{deployed.url}/v1/completions", json=body(), timeout=60).json()
    request = pb.GenerateRequest(model="smollm2", text="Bread is", temperature=0, max_tokens=8)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{deployed.grpc_port}") as channel:
        replies = [reply async for reply in InferenceStub(channel).Generate(request, timeout=60)]
    text = "".join(reply.text for reply in replies)
    assert text == answer["choices"][0]["text"]
    assert text.strip()


async def test_a_change_of_limits_is_taken_by_the_same_processes_while_they_serve(deployed: Deployed) -> None:
    before = deployed.ray.pids()
    assert {name: len(pids) for name, pids in before.items()} == {"Gateway": 1, "Replica": 1}
    assert deployed.status_of(prompt=["a", "b"]) == 200
    async with httpx.AsyncClient(timeout=120) as client:
        long = body(max_tokens=400, ignore_eos=True, stream=True)
        async with client.stream("POST", f"{deployed.url}/v1/completions", json=long) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            deployed.change("config.gateway.max_prompts=1", "config.replica.max_waiting_requests=1")
            await asyncio.to_thread(
                wait_until, lambda: deployed.status_of(prompt=["a", "b"]) == 400, APPLY_TIMEOUT_S, "a limit holds"
            )
            last = [line async for line in lines if line][-1]
    assert last == "data: [DONE]"
    deployed.ray.wait_until_running()
    assert deployed.ray.pids() == before
