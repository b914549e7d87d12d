"""`bakehouse plan calibrate`: loads the model, measures its steps, shows how far off the fitted cost model is."""

import platform
import secrets
from pathlib import Path

import psutil
import torch
from bakehouse_replica.build import executor_of, step_sizes_of
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.executor import Executor
from bakehouse_replica.executors.device_choice import device_of, kind_of, kv_dtype_of
from bakehouse_replica.model.spec import read_spec
from bakehouse_replica.settings import ReplicaSettings
from bakehouse_replica.source import ModelFiles, open_source
from rich.console import Console

from bakehouse_cluster.bench.result import require_writable
from bakehouse_cluster.bench.table import plain_table, print_table
from bakehouse_cluster.capturing import captures_told
from bakehouse_cluster.compiling import compiling_told
from bakehouse_cluster.config import Config
from bakehouse_cluster.plan.calibrate import (
    N_ROUNDS,
    Measured,
    fit,
    fit_of,
    fits_by_kind,
    measure,
    split,
    step_sizes,
)
from bakehouse_cluster.plan.cost_file import CostFile, shape_of, write_cost
from bakehouse_cluster.progress import Stages, counted, n_of

MIN_SIZES = 9  # two thirds for six coefficients, and three to test them by


def calibrate(config: Config, output: Path | None, console: Console) -> None:
    """Measures the replica that `config` describes in this process; the table goes to standard output.

    Raises `StartupError` where the model cannot be run, or `output` not be written.
    """
    if output is not None:
        require_writable(output)
    settings, files = config.replica_settings(secrets.token_bytes(32)), open_source(config.source)
    if files.is_script or settings.executor == "fake":
        raise StartupError(f"{files.name!r} runs no model, so its steps cost nothing that could be measured")
    stages = Stages(console)
    with (
        stages.stage(f"model {config.model.source}"),
        compiling_told(stages.note),
        captures_told(stages.note, files.cache_dir),
    ):
        executor, vocabulary_size, max_model_len = executor_of(settings, files)
    try:
        measured = _measured(executor, settings, files, vocabulary_size, max_model_len, console)
    finally:
        executor.close()
    file = _cost_file(measured, settings, files, max_model_len)
    _show(file, Console())
    if output is not None:
        write_cost(file, output)


def _measured(
    executor: Executor,
    settings: ReplicaSettings,
    files: ModelFiles,
    vocabulary_size: int,
    max_model_len: int,
    console: Console,
) -> list[Measured]:
    sizes = step_sizes(
        executor.capacity,
        max_model_len=max_model_len,
        max_prefill_tokens=step_sizes_of(settings, files).max_prefill_tokens,
    )
    if len(sizes) < MIN_SIZES:
        raise StartupError(
            f"only {len(sizes)} sizes of steps fit into contexts of {max_model_len} tokens and steps of "
            f"{executor.capacity.max_step_tokens}; a calibration needs {MIN_SIZES}"
        )
    with counted(console, "steps", n_total=(N_ROUNDS + 1) * len(sizes), n_done=0) as advance:
        return measure(executor, sizes, vocabulary_size=vocabulary_size, advance=advance)


def _cost_file(
    measured: list[Measured], settings: ReplicaSettings, files: ModelFiles, max_model_len: int
) -> CostFile:
    fitted, held_out = split(measured)
    cost, device = fit(fitted), device_of(settings)
    return CostFile(
        cost=cost,
        device="cuda" if device.type == "cuda" else "cpu",
        model=files.name,
        shape=shape_of(read_spec(files)),
        weights=kind_of(settings, device),
        kv_dtype=str(kv_dtype_of(settings, device)).removeprefix("torch."),
        n_ranks=settings.tensor_parallel,
        machine=_machine(device),
        max_context=max_model_len,
        fit=fit_of(cost, held_out),
        fit_by_kind=fits_by_kind(cost, held_out),
    )


def _machine(device: torch.device) -> str:
    """Loading has set the threads of this process."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    n_threads = n_of(torch.get_num_threads(), "thread")
    return f"{platform.machine()}, {n_of(psutil.cpu_count() or 1, 'core')}, {n_threads} a rank"


def _show(file: CostFile, console: Console) -> None:
    cost = file.cost
    said = (
        f"{file.model} in {file.weights} on {file.machine}: a step takes {cost.step_s * 1e3:.4g} ms"
        f" + {cost.prefill_token_s * 1e6:.4g} us a prompt token + {cost.decode_sequence_s * 1e6:.4g} us a decode"
        f" + {cost.context_token_s * 1e9:.4g} ns a token of context"
        f" + {cost.read_token_s * 1e9:.4g} ns a token read + {cost.pair_s * 1e9:.4g} ns a pair of prompt tokens"
    )
    console.print(said, highlight=False, soft_wrap=True, markup=False)
    table = plain_table("steps held out", "number", "error p50", "p90", "max", "of their sum")
    assert file.fit is not None, "a calibration says how far off it is"
    for name, one in (*file.fit_by_kind.items(), ("all", file.fit)):
        shares = (f"{share:.1%}" for share in (one.error_p50, one.error_p90, one.error_max))
        table.add_row(name, str(one.n_steps), *shares, f"{one.error_total:+.1%}")
    print_table(table, console)
