"""Builds one replica's engine from its settings."""

from collections.abc import Callable

from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.types import Capacity, ReplicaCard, SchedulingPolicy
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_replica.executors.in_process import load_executor
from bakehouse_replica.model.sizing import choose_max_model_len
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import open_source

FAKE_BLOCK_SIZE = 16


def build_engine(
    settings: ReplicaSettings, *, replica_id: str, on_failure: Callable[[str], None] | None = None
) -> Engine:
    """An engine that is ready to be started: files found, weights loaded, kernels compiled.

    Raises `StartupError` where this cannot be had on this machine. `on_failure`: see `Engine`.
    """
    files = open_source(settings.source)
    spec = read_spec(files)
    max_model_len = choose_max_model_len(spec, settings.max_model_len)
    executor: Executor
    if settings.executor == "fake":
        executor = _fake_executor(settings, spec, max_model_len)
    else:
        executor = load_executor(settings, files, spec, max_model_len)
    capacity = executor.capacity
    card = ReplicaCard(
        replica_id=replica_id,
        model_name=settings.served_name or settings.source.model,
        model_digest=files.digest,
        hash_key=settings.hash_key,
        block_size=capacity.block_size,
        n_blocks=capacity.n_blocks,
        vocabulary_size=spec.vocabulary_size,
        max_model_len=max_model_len,
        max_sequences=capacity.max_sequences,
        kv_bytes=capacity.n_blocks * capacity.block_bytes,
    )
    policy = SchedulingPolicy(
        max_model_len=max_model_len,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_waiting_requests=settings.max_waiting_requests,
    )
    return Engine(executor=executor, policy=policy, card=card, on_failure=on_failure)


def _fake_executor(settings: ReplicaSettings, spec: ModelSpec, max_model_len: int) -> FakeExecutor:
    """The model's vocabulary and limits without its weights, with room for `max_sequences` of the longest."""
    block_size = settings.block_size or FAKE_BLOCK_SIZE
    capacity = Capacity(
        n_blocks=settings.max_sequences * (max_model_len // block_size + 1),
        block_size=block_size,
        max_step_tokens=settings.max_step_tokens,
        max_sequences=settings.max_sequences,
    )
    return FakeExecutor(capacity, vocabulary_size=spec.vocabulary_size)
