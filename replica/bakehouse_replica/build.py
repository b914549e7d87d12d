"""Builds one replica's engine from its settings."""

from collections.abc import Callable

import torch

from bakehouse_replica.core.capacity import KVShape, blocks_for, plan_blocks
from bakehouse_replica.core.errors import BakehouseError, StartupError
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.core.types import Capacity, ReplicaCard, SchedulingPolicy
from bakehouse_replica.engine import Engine
from bakehouse_replica.executors.device_choice import device_of, dtype_of, kv_dtype_of
from bakehouse_replica.executors.fake import FakeExecutor
from bakehouse_replica.executors.loading import load_model
from bakehouse_replica.executors.scripted import ScriptedExecutor
from bakehouse_replica.executors.step_sizes import StepSizes, step_sizes
from bakehouse_replica.executors.tensor_parallel import OwnPart, RankPlaces, TensorParallelExecutor, gather, lead
from bakehouse_replica.executors.token_cache import SLOT_BYTES
from bakehouse_replica.grammar_compiler import GrammarCompiler
from bakehouse_replica.model.collective import Collective
from bakehouse_replica.model.grammar import GrammarStore
from bakehouse_replica.model.sharding import check_sizes
from bakehouse_replica.model.sizing import choose_max_model_len
from bakehouse_replica.model.spec import ModelSpec, read_spec
from bakehouse_replica.script import read_script
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles, open_source
from bakehouse_replica.tokenizer_files import load_tokenizer
from bakehouse_replica.vocabulary import vocabulary_of

CPU = torch.device("cpu")
FAKE_BLOCK_SIZE = 16
LOCAL_RANKS = RankPlaces()
# By default a script's pool holds `max_sequences` of the longest, or as many of them as this does, at least one.
SCRIPTED_KV_BYTES = 64 * 1024**2


def build_engine(
    settings: ReplicaSettings,
    *,
    replica_id: str,
    on_failure: Callable[[str], None] | None = None,
    ranks: RankPlaces = LOCAL_RANKS,
) -> Engine:
    """An engine that is ready to be started: files found, weights loaded, kernels compiled.

    Raises `StartupError` where this cannot be had on this machine. `on_failure`: see `Engine`. `ranks`: where
    those of a tensor-parallel replica run; by default in processes of this machine.
    """
    files = open_source(settings.source)
    executor, vocabulary_size, max_model_len = executor_of(settings, files, ranks)
    capacity = executor.capacity
    card = ReplicaCard(
        replica_id=replica_id,
        model_name=settings.served_name or settings.source.model,
        model_digest=_digest(settings, files),
        hash_key=settings.hash_key,
        block_size=capacity.block_size,
        n_blocks=capacity.n_blocks,
        vocabulary_size=vocabulary_size,
        max_model_len=max_model_len,
        max_sequences=capacity.max_sequences,
        kv_bytes=capacity.n_blocks * capacity.block_bytes,
    )
    policy = SchedulingPolicy(
        max_model_len=max_model_len,
        max_prefill_tokens=step_sizes_of(settings, files).max_prefill_tokens,
        max_waiting_requests=settings.max_waiting_requests,
    )
    engine = Engine(executor=executor, policy=policy, card=card, on_failure=on_failure)
    if isinstance(executor, TensorParallelExecutor):
        executor.tell_of_loss(lambda loss: _lose(engine, ranks, loss))
    return engine


def step_sizes_of(settings: ReplicaSettings, files: ModelFiles) -> StepSizes:
    """Those of a CPU where no model runs, whatever there is on this machine."""
    runs_model = not files.is_script and settings.executor == "model"
    return step_sizes(settings, device_of(settings) if runs_model else CPU)


def _lose(engine: Engine, ranks: RankPlaces, loss: BakehouseError) -> None:
    engine.fail(loss)
    if ranks.on_loss is not None:
        ranks.on_loss(str(loss))


def _digest(settings: ReplicaSettings, files: ModelFiles) -> str:
    """What tells this replica's keys and values from those of another model, or of the same one in fewer bits."""
    digest, device = files.digest, device_of(settings)
    if settings.quantize != "none":
        digest += f"-{settings.quantize}"
    elif dtype_of(settings, device) == torch.bfloat16:
        digest += "-bfloat16"
    kv_dtype = kv_dtype_of(settings, device)
    return digest if kv_dtype == torch.float32 else f"{digest}-{str(kv_dtype).removeprefix('torch.')}"


def executor_of(
    settings: ReplicaSettings, files: ModelFiles, ranks: RankPlaces = LOCAL_RANKS
) -> tuple[Executor, int, int]:
    """The executor that `build_engine` drives, the size of its vocabulary, and the longest context."""
    if settings.tensor_parallel > 1 and (files.is_script or settings.executor == "fake"):
        raise StartupError(f"--tensor-parallel is {settings.tensor_parallel}, but {files.name!r} runs no model")
    if files.is_script:
        script = read_script(files.path)
        max_model_len = choose_max_model_len(script.max_model_len, settings.max_model_len)
        capacity = scripted_capacity(settings, max_model_len)
        if capacity.max_flights > 1 and script.tokens_per_step > 1:
            raise StartupError(f"{files.path} draws {script.tokens_per_step} tokens a step; --overlap on needs 1")
        grammars = GrammarStore(GrammarCompiler(script.vocabulary, script.vocabulary_size))
        return ScriptedExecutor(script, capacity, constraints=grammars), script.vocabulary_size, max_model_len
    spec = read_spec(files)
    max_model_len = choose_max_model_len(spec.context_length, settings.max_model_len)
    if settings.executor == "fake":
        return _fake_executor(settings, spec, max_model_len), spec.vocabulary_size, max_model_len
    check_sizes(spec, settings.tensor_parallel)
    loaded = _model_executor(settings, files, spec, max_model_len, ranks)
    return loaded, spec.vocabulary_size, max_model_len


def _model_executor(
    settings: ReplicaSettings, files: ModelFiles, spec: ModelSpec, max_model_len: int, ranks: RankPlaces
) -> Executor:
    """The one that runs the model itself, on one device or on several."""
    grammars = _grammars(files, spec)
    if settings.tensor_parallel == 1:
        return load_model(settings, files, spec, max_model_len, constraints=grammars)

    def load(collective: Collective) -> OwnPart:
        return load_model(settings, files, spec, max_model_len, constraints=grammars, collective=collective)

    return gather(lead(settings, ranks), load)


def _grammars(files: ModelFiles, spec: ModelSpec) -> GrammarStore:
    """The tokenizer is loaded at the first grammar."""
    return GrammarStore(
        GrammarCompiler(lambda: vocabulary_of(load_tokenizer(files).backend_tokenizer), spec.vocabulary_size)
    )


def scripted_capacity(settings: ReplicaSettings, max_model_len: int) -> Capacity:
    """`kv_memory_bytes`, where given, bounds the cache of token ids. Raises `StartupError` if it is too small."""
    block_size, sizes = settings.block_size or FAKE_BLOCK_SIZE, step_sizes(settings, CPU)
    shape = KVShape(n_layers=1, n_kv_heads=1, head_dim=1, element_bytes=SLOT_BYTES // 2, block_size=block_size)
    longest_bytes = blocks_for(max_model_len, block_size) * shape.block_bytes
    budget_bytes = settings.kv_memory_bytes
    if budget_bytes is None:
        budget_bytes = max(longest_bytes, min(SCRIPTED_KV_BYTES, sizes.max_sequences * longest_bytes))
    return Capacity(
        n_blocks=plan_blocks(shape, budget_bytes=budget_bytes, max_model_len=max_model_len),
        block_size=block_size,
        block_bytes=shape.block_bytes,
        max_step_tokens=sizes.max_step_tokens,
        max_sequences=sizes.max_sequences,
        max_flights=settings.max_flights(is_apart=False),
    )


def _fake_executor(settings: ReplicaSettings, spec: ModelSpec, max_model_len: int) -> FakeExecutor:
    """The model's vocabulary and limits without its weights, with room for `max_sequences` of the longest."""
    block_size, sizes = settings.block_size or FAKE_BLOCK_SIZE, step_sizes(settings, CPU)
    capacity = Capacity(
        n_blocks=sizes.max_sequences * (max_model_len // block_size + 1),
        block_size=block_size,
        max_step_tokens=sizes.max_step_tokens,
        max_sequences=sizes.max_sequences,
        max_flights=settings.max_flights(is_apart=False),
    )
    return FakeExecutor(capacity, vocabulary_size=spec.vocabulary_size, step_s=settings.fake_step_s)
