"""`bakehouse bench`: its options."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from bakehouse_replica.core.errors import StartupError
from rich.console import Console

from bakehouse_cluster.bench.workloads import PromptForm

INTERRUPTED = 130
FAILED = 1

app = typer.Typer(
    invoke_without_command=True,
    help="Measure any server with OpenAI's HTTP API: throughput and latencies under load.",
)


@app.callback()
def bench(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(help="The server, without /v1; by default port 8000 here.", show_default=False)
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="The first that is served by default.")] = None,
    key: Annotated[str | None, typer.Option(help="API key.", envvar="BAKEHOUSE_API_KEY")] = None,
    workload: Annotated[str, typer.Option(help="W1, W2, W3, W4, fixed, mixed, shared-prefix or trace.")] = "fixed",
    concurrency: Annotated[
        str | None, typer.Option(help="Users at once, each waiting for its answer: 1,8,32.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Requests a second at random times (Poisson): 0.5,2.")] = None,
    speed: Annotated[
        str | None, typer.Option(help="A trace at its own times, so many times as fast: 1,2.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="At each load; 64 by default.")] = None,
    input_tokens: Annotated[
        str | None, typer.Option(help="128; mixed: 16-256; shared-prefix: those after the prefix.")
    ] = None,
    output_tokens: Annotated[str | None, typer.Option(help="64; mixed: 8,16,32,128.")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(min=1, help="Shared by many prompts.")] = None,
    prefixes: Annotated[int | None, typer.Option(min=1, help="How many different ones.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with arrival_s, prompts and output_tokens.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask by chat instead of completions.")] = False,
    prompt: Annotated[PromptForm, typer.Option(help="How prompts are sent.")] = PromptForm.TEXT,
    tokenizer: Annotated[
        str | None, typer.Option(help="Counts prompts: server, or a model; the server's by default, else smollm2.")
    ] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Requests before each load, uncounted.")] = None,
    cold_prefixes: Annotated[bool, typer.Option("--cold-prefixes", help="Warm up with other prefixes.")] = False,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a whole answer.")] = 600,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of exactly the length asked for.")] = True,
    min_tokens: Annotated[bool, typer.Option("--min-tokens", help="Also ask for it by min_tokens.")] = False,
    usage: Annotated[bool, typer.Option(help="Ask for token counts at the end; else frames are counted.")] = True,
    frame_usage: Annotated[
        bool, typer.Option("--frame-usage", help="Ask for token counts in each frame.")
    ] = False,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object of further fields; null takes one away.")
    ] = None,
    label: Annotated[str, typer.Option(help="What the system is called in tables.")] = "",
    output: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of latency and throughput against load.")] = None,
) -> None:
    """Measure a server."""
    if context.invoked_subcommand is not None:
        return
    # Load numpy and HTTP clients, which the other commands must not wait for.
    from bakehouse_cluster.bench.finding import found_server
    from bakehouse_cluster.bench.foreign import printable
    from bakehouse_cluster.bench.measuring import Plan, run_bench
    from bakehouse_cluster.bench.options import Lengths, choose_loads, choose_workload, read_extra_body
    from bakehouse_cluster.bench.plot import check_plot, plot_result
    from bakehouse_cluster.bench.result import require_writable, write_result
    from bakehouse_cluster.bench.table import Bars, show_result
    from bakehouse_cluster.bench.target import Target
    from bakehouse_cluster.bench.traces import require_sendable

    lengths = Lengths(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_tokens=prefix_tokens,
        prefixes=prefixes,
        n_requests=requests,
        trace=trace,
    )
    chosen = choose_workload(workload, lengths)
    plan = Plan(
        name=workload,
        workload=chosen,
        loads=choose_loads(workload, chosen, concurrency=concurrency, rate=rate, speed=speed),
        seed=seed,
        n_warmup=warmup,
        warms_prefixes=not cold_prefixes,
        timeout_s=timeout,
        label=printable(label),
    )
    extra_fields = read_extra_body(extra_body)
    require_sendable(chosen, is_chat=chat)
    if output is not None:
        require_writable(output)
    if plot is not None:
        check_plot(plan.loads, plot)
    console = Console(stderr=True)
    with found_server(url, key=key, model=model, tokenizer=tokenizer) as found:
        target = Target(
            url=found.url,
            model=found.model,
            key=key,
            api="chat" if chat else "completions",
            prompt_form=prompt,
            ignores_eos=ignore_eos,
            sends_min_tokens=min_tokens,
            asks_usage=usage,
            counts_frames=frame_usage,
            extra_body=extra_fields,
        )
        result = run_bench(plan, target, found.encoder, server=found.software, observer=Bars(console))
    show_result(result, Console())
    if output is not None:
        write_result(result, output)
    if plot is not None and result.points:
        plot_result(result, plot)
    if result.is_partial:
        sys.exit(INTERRUPTED)
    if not result.n_answered:
        raise StartupError(f"{found.url} answered no request; the reasons stand below the table")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A JSON file of --output.")],
    second: Annotated[Path, typer.Argument(help="Another, of the same workload and seed.")],
    fail_below: Annotated[
        float | None,
        typer.Option(help="Exit with 1 where the second's output tok/s are below so many of the first's."),
    ] = None,
) -> None:
    """Set two results side by side."""
    # Load numpy and pydantic, which the other commands must not wait for.
    from bakehouse_cluster.bench.compare import least_ratio, pair_points, show_comparison
    from bakehouse_cluster.bench.result import read_result

    a, b = read_result(first), read_result(second)
    pairs = pair_points(a, b)
    console = Console()
    show_comparison(a, b, pairs, console)
    if fail_below is not None and least_ratio(pairs) < fail_below:
        console.print(f"below {fail_below:g} times the first's output tok/s", style="bold red", highlight=False)
        sys.exit(FAILED)
