"""`bakehouse plan calibrate`: its options."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bakehouse_cluster.config import load_config
from bakehouse_cluster.plan.interruption import interruption_told


def calibrate(
    model: Annotated[
        str | None, typer.Argument(help="Alias, folder, GGUF file or hub id.", show_default="smollm2")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of the server; flags override it.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="The longest context that is measured; the model's own by default.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV cache of one replica, as 512MiB or 2GB.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; auto: bfloat16 on a GPU.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8 for 8-bit matrix products.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Keys and values: auto, float32 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="dummy for random ones, made from config.json alone.")
    ] = None,
    overlap: Annotated[
        str | None, typer.Option(help="Plan a step while one runs: on, off; auto: on a GPU.")
    ] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Ranks that share one copy of the model.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for `bakehouse plan --cost`.")] = None,
) -> None:
    """Measure on this machine what a step costs: a minute or two, with a processor that has nothing else to do."""
    overrides = {
        "model.source": model,
        "model.revision": revision,
        "model.max_model_len": max_model_len,
        "model.dtype": dtype,
        "model.quantize": quantize,
        "model.kv_dtype": kv_dtype,
        "model.device": device,
        "model.weights": weights,
        "replica.kv_memory": kv_memory,
        "replica.overlap": overlap,
        "replica.tensor_parallel": tensor_parallel,
    }
    # Loads torch, which the other commands must not wait for.
    from bakehouse_cluster.plan import calibrating

    with interruption_told("all steps were measured"):
        calibrating.calibrate(load_config(config, overrides), output, Console(stderr=True))
