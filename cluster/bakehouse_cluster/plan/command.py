"""`bakehouse plan`: its options."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from bakehouse_replica.core.errors import StartupError
from rich.console import Console

from bakehouse_cluster.plan.calibrate_command import calibrate
from bakehouse_cluster.plan.choices import Percentile, Routing
from bakehouse_cluster.plan.interruption import interruption_told

INSUFFICIENT = 1

app = typer.Typer(
    invoke_without_command=True,
    help="How many replicas a workload needs, by running the scheduler and the router on a virtual clock.",
)


@app.callback()
def plan(
    context: typer.Context,
    slo: Annotated[
        str | None, typer.Option(help="Limits of latencies: ttft=1s,itl=50ms,e2e=20s, any of them.")
    ] = None,
    cost: Annotated[
        Path | None, typer.Option(help="What a step costs: the JSON file of `bakehouse plan calibrate`.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="JSON lines, as bench reads them.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="W1, W2, W3, W4, fixed, mixed, shared-prefix, or trace where one is given.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Requests a second at random times (Poisson).")] = None,
    speed: Annotated[str | None, typer.Option(help="A trace at its own times, so many times as fast.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Users at once, each waiting for its answer.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; 64 by default, of a trace all.")] = None,
    input_tokens: Annotated[
        str | None, typer.Option(help="128; mixed: 16-256; shared-prefix: those after the prefix.")
    ] = None,
    output_tokens: Annotated[str | None, typer.Option(help="64; mixed: 8,16,32,128.")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(min=1, help="Shared by many prompts.")] = None,
    prefixes: Annotated[int | None, typer.Option(min=1, help="How many different ones.")] = None,
    max_replicas: Annotated[int, typer.Option(min=1, help="The largest fleet that is tried.")] = 8,
    percentile: Annotated[
        Percentile, typer.Option(help="Of latencies, that has to keep the limits.")
    ] = Percentile.P99,
    goodput: Annotated[float, typer.Option(help="Share of all requests answered within all limits.")] = 0.99,
    every_size: Annotated[bool, typer.Option("--all", help="Simulate every size, not only those needed.")] = False,
    routing: Annotated[Routing, typer.Option(help="Others than production to compare with.")] = Routing.PRODUCTION,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which a client gives up.")] = 600,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests and the same plan.")] = 0,
    config: Annotated[Path | None, typer.Option(help="YAML file of the server; flags override it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Alias, folder, GGUF file or hub id; smollm2 by default.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Context in tokens; the model's own by default.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV cache of one replica, as 512MiB or 2GB.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; auto: bfloat16 on a GPU.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8 for 8-bit matrix products.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Keys and values: auto, float32 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; that of the cost by default.")] = None,
    overlap: Annotated[
        str | None, typer.Option(help="Plan a step while one runs: on, off; auto: on a GPU.")
    ] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Ranks that share one copy of the model.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the plan.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the plan against the number of replicas.")] = None,
) -> None:
    """Plan a fleet."""
    if context.invoked_subcommand is not None:
        return
    # Load numpy and torch, which the other commands must not wait for.
    from bakehouse_cluster.bench.options import Lengths, choose_loads, choose_workload
    from bakehouse_cluster.bench.plot import require_drawable
    from bakehouse_cluster.bench.result import require_writable
    from bakehouse_cluster.bench.table import Bars
    from bakehouse_cluster.config import load_config
    from bakehouse_cluster.plan.cost_file import read_cost
    from bakehouse_cluster.plan.encoding import PromptEncoder
    from bakehouse_cluster.plan.objective import parse_objective
    from bakehouse_cluster.plan.planning import make_plan
    from bakehouse_cluster.plan.plot import plot_plan
    from bakehouse_cluster.plan.replica_shape import gateway_shape, replica_shape
    from bakehouse_cluster.plan.result import Question, write_plan
    from bakehouse_cluster.plan.table import show_plan

    if slo is None:
        raise StartupError("--slo is missing: what the latencies have to be, as in --slo ttft=1s,itl=50ms")
    if cost is None:
        raise StartupError("--cost is missing: `bakehouse plan calibrate --output cost.json` measures one")
    if workload is None and trace is None:
        raise StartupError("--trace FILE or --workload NAME is missing: what is to be served")
    name = workload or "trace"
    lengths = Lengths(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_tokens=prefix_tokens,
        prefixes=prefixes,
        n_requests=requests,
        trace=trace,
    )
    objective = parse_objective(slo, percentile=percentile, goodput=goodput)
    chosen = choose_workload(name, lengths)
    loads = choose_loads(name, chosen, concurrency=concurrency, rate=rate, speed=speed)
    if len(loads) > 1:
        raise StartupError(f"one load is planned for at a time, not {', '.join(load.label for load in loads)}")
    measured = read_cost(cost)
    overrides = {
        "model.source": model,
        "model.revision": revision,
        "model.max_model_len": max_model_len,
        "model.dtype": dtype,
        "model.quantize": quantize,
        "model.kv_dtype": kv_dtype,
        "model.device": device,
        "replica.kv_memory": kv_memory,
        "replica.overlap": overlap,
        "replica.tensor_parallel": tensor_parallel,
    }
    tree = load_config(config, overrides)
    if output is not None:
        require_writable(output)
    if plot is not None:
        require_drawable(plot)
    question = Question(
        workload=name,
        kind=chosen.kind,
        parameters=chosen.parameters(),
        load=loads[0],
        n_requests=chosen.n_requests,
        seed=seed,
        model=tree.served_name,
        replica=replica_shape(tree, measured),
        gateways=gateway_shape(tree),
        cost=measured,
        objective=objective,
        routing=routing,
        timeout_s=timeout,
        max_replicas=max_replicas,
    )
    encoder = PromptEncoder(tree.source, chat_template=tree.gateway_settings().chat_template)
    with interruption_told("an answer was found"):
        result = make_plan(
            question, chosen, encoder.encode, simulates_all=every_size, observer=Bars(Console(stderr=True))
        )
    show_plan(result, Console())
    if output is not None:
        write_plan(result, output)
    if plot is not None:
        plot_plan(result, plot)
    if result.answer is None:
        sys.exit(INSUFFICIENT)


app.command()(calibrate)
