"""The actor in a real Ray: what Serve and the router get from it, and what its engine's failure leads to."""

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from bakehouse_replica.actor import ReplicaActor
from bakehouse_replica.core.sampling import SamplingParams
from bakehouse_replica.core.types import Delivery, FailureKind, FinishReason, ModelSource, ReplicaStatus, Request
from bakehouse_replica.core.wire import card_from_wire, load_from_wire
from bakehouse_replica.settings import ReplicaSettings
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # two starts of workers, on cores that may be busy
WAIT_S = 180.0  # a replacement loads torch and numba anew, on cores that may be busy
STATUS_WAIT_S = 5.0
BROKEN_TOKEN = 299


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="bh", dir="/tmp")  # short: socket paths end at 107 characters
    with pytest.MonkeyPatch.context() as environment:
        # Else 15: beside anything else that works here, a start takes minutes.
        environment.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        serve.start(proxy_location="Disabled")  # Serve would wait for one, 5 s at a time, and it is not used
    yield
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def save_model(folder: Path, *, is_broken: bool) -> ModelSource:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    if is_broken:
        # Of one token only: with all of them broken the replica would not even start.
        torch.nn.init.constant_(model.model.embed_tokens.weight[BROKEN_TOKEN], float("nan"))
    model.save_pretrained(folder)
    return ModelSource(model=str(folder))


def deploy(name: str, settings: ReplicaSettings) -> DeploymentHandle[ReplicaActor]:
    decorate = serve.deployment(name=name, ray_actor_options={"num_cpus": 0.5}, health_check_period_s=1)
    return serve.run(decorate(ReplicaActor).bind(settings), name=name, route_prefix=None)


def deliveries(handle: DeploymentHandle[ReplicaActor], request: Request) -> list[Delivery]:
    stream = handle.options(method_name="generate", stream=True).remote(request)
    assert isinstance(stream, DeploymentResponseGenerator)
    return list(stream)


def request(*prompt_ids: int, n: int = 1) -> Request:
    params = SamplingParams(n=n, max_tokens=20, seed=1, temperature=0.0)
    return Request(request_id="a", prompt_ids=prompt_ids, params=params)


def status_of(handle: DeploymentHandle[ReplicaActor], wait_s: float = WAIT_S) -> ReplicaStatus:
    status: ReplicaStatus = handle.status.remote().result(timeout_s=wait_s)
    return status


def test_a_replica_streams_and_reports_what_routers_need(local_ray: None, tmp_path: Path) -> None:
    settings = ReplicaSettings(source=save_model(tmp_path, is_broken=False), kv_memory_bytes=4_000_000)
    handle = deploy("sound", settings)
    received = deliveries(handle, request(1, 2, 3))
    deltas = [delta for delivery in received for delta in delivery.deltas]
    assert sum(len(delta.token_ids) for delta in deltas) == 20
    assert deltas[-1].finish is FinishReason.LENGTH
    status = status_of(handle)
    assert {delivery.replica_id for delivery in received} == {status.card.replica_id}
    assert card_from_wire(handle.record_replica_metadata.remote().result(timeout_s=WAIT_S)) == status.card
    load, problem = load_from_wire(handle.record_routing_stats.remote().result(timeout_s=WAIT_S))
    assert problem is None
    assert load is not None
    assert (load.n_running, load.n_held_blocks) == (0, 0)
    serve.delete("sound")


def test_a_replica_whose_engine_fails_tells_its_streams_and_is_replaced(local_ray: None, tmp_path: Path) -> None:
    settings = ReplicaSettings(source=save_model(tmp_path, is_broken=True), kv_memory_bytes=4_000_000)
    handle = deploy("broken", settings)
    before = status_of(handle).card.replica_id
    ends = [delta for delivery in deliveries(handle, request(1, BROKEN_TOKEN, n=2)) for delta in delivery.deltas]
    assert [delta.finish for delta in ends] == [FinishReason.ERROR] * 2
    assert all(delta.failure is not None and delta.failure.kind is FailureKind.ENGINE for delta in ends)

    wait_until_replaced(handle, before)
    serve.delete("broken")


def wait_until_replaced(handle: DeploymentHandle[ReplicaActor], before: str) -> None:
    is_over = threading.Event()
    timer = threading.Timer(WAIT_S, is_over.set)
    timer.start()
    while not is_over.is_set() and replica_id_or_none(handle) in (None, before):
        is_over.wait(0.2)
    timer.cancel()
    assert not is_over.is_set(), "no other replica has taken its place"


def replica_id_or_none(handle: DeploymentHandle[ReplicaActor]) -> str | None:
    try:
        return status_of(handle, STATUS_WAIT_S).card.replica_id
    except (ray.exceptions.RayError, TimeoutError):
        return None  # the old one has gone, the new one is not there yet


def test_a_replica_whose_engine_hangs_in_a_step_ends_and_is_replaced(local_ray: None, tmp_path: Path) -> None:
    script = tmp_path / "stalls.json"
    script.write_text(json.dumps({"pieces": ["x"], "default": {"ids": [0]}, "stall_at": 3}))
    handle = deploy("hanging", ReplicaSettings(source=ModelSource(model=f"scripted:{script}"), step_timeout_s=2.0))
    before = status_of(handle).card.replica_id
    with pytest.raises(ray.exceptions.RayActorError):  # by which gateways know that it goes on elsewhere
        deliveries(handle, request(0))
    wait_until_replaced(handle, before)
    serve.delete("hanging")
