"""The command line."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from bakehouse_replica.core.errors import BakehouseError
from bakehouse_replica.source import open_source
from rich.console import Console

from bakehouse_cluster import config_command, serving
from bakehouse_cluster.bench import command as bench
from bakehouse_cluster.capturing import captures_told
from bakehouse_cluster.compiling import compiling_told
from bakehouse_cluster.config import load_config
from bakehouse_cluster.plan import command as plan
from bakehouse_cluster.progress import Stages

# The shell's convention for a program that Ctrl-C ended.
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve language models to many users at once.",
)

Model = Annotated[
    str | None,
    typer.Argument(help="Alias, folder, GGUF file, hub id or scripted:FILE.", show_default="smollm2"),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file; flags override it.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Context in tokens; the model's own by default.")]
KvMemory = Annotated[str | None, typer.Option(help="KV cache of one replica, as 512MiB or 2GB.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, or bfloat16 for matrix products of half the bits; auto: bfloat16 on a GPU."),
]
Quantize = Annotated[str | None, typer.Option(help="int8 for 8-bit matrix products; none by default.")]
KvDtype = Annotated[str | None, typer.Option(help="Keys and values: auto, float32 or float16.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Weights = Annotated[str | None, typer.Option(help="dummy for random ones, made from config.json alone.")]
Overlap = Annotated[str | None, typer.Option(help="Plan a step while one runs: on, off; auto: on a GPU.")]
TensorParallel = Annotated[int | None, typer.Option(help="Ranks that share one copy of the model; 1 by default.")]
ChatTemplate = Annotated[str | None, typer.Option(help="Jinja file or text that replaces the model's template.")]

app.add_typer(bench.app, name="bench")
app.add_typer(plan.app, name="plan")
app.add_typer(config_command.app, name="config")


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version("bakehouse"))
        raise typer.Exit


@app.callback()
def _options(
    is_asked: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def serve(
    model: Model = None,
    config: ConfigFile = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 8000 by default.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC face; none by default.")] = None,
    ingress: Annotated[str | None, typer.Option(help="Who listens: direct, proxy or haproxy.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Copies of the model.")] = None,
    keys: Annotated[Path | None, typer.Option(help="YAML file of API keys and their tenants.")] = None,
    allow_unauthenticated: Annotated[
        bool | None, typer.Option("--allow-unauthenticated", help="Listen beyond loopback without keys.")
    ] = None,
    max_model_len: MaxModelLen = None,
    kv_memory: KvMemory = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    device: Device = None,
    weights: Weights = None,
    overlap: Overlap = None,
    tensor_parallel: TensorParallel = None,
    revision: Revision = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    chat_template: ChatTemplate = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C."""
    overrides = {
        "server.host": host,
        "server.port": port,
        "server.grpc_port": grpc_port,
        "server.ingress": ingress,
        "server.replicas": replicas,
        "server.allow_unauthenticated": allow_unauthenticated,
        "gateway.keys": keys,
        "model.source": model,
        "model.revision": revision,
        "model.served_name": served_model_name,
        "model.chat_template": chat_template,
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
    sys.exit(serving.serve(load_config(config, overrides), Stages(Console(stderr=True))))


@app.command()
def monitor(
    session: Annotated[
        Path | None, typer.Option(help="Ray's temporary folder, or a session in it, where several Rays run here.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="The same, by the address at which programs join it.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of Prometheus; a free one by default.")] = None,
) -> None:
    """Collect the metrics of a running server with Prometheus, until Ctrl-C."""
    # Loads the HTTP client, which the other commands must not wait for.
    from bakehouse_cluster.monitor import scrape_until_interrupted

    scrape_until_interrupted(session=session, address=address, port=port, stages=Stages(Console(stderr=True)))


@app.command()
def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="A request's id (x-request-id), or its reply's.")
    ],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(help="API key of the server.", envvar="BAKEHOUSE_API_KEY")] = "none",
) -> None:
    """Why a request waited, where it went, and for whom it made way."""
    # Loads the HTTP client, which the other commands must not wait for.
    from bakehouse_cluster import explaining

    explaining.explain(request_id, url=url, key=key, console=Console())


@app.command()
def generate(
    input_path: Annotated[Path, typer.Option("--input", help="JSON lines: prompts, messages, or OpenAI Batch.")],
    output_path: Annotated[Path, typer.Option("--output", help="JSON lines; what it holds is not done again.")],
    model: Model = None,
    config: ConfigFile = None,
    max_model_len: MaxModelLen = None,
    kv_memory: KvMemory = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    device: Device = None,
    weights: Weights = None,
    overlap: Overlap = None,
    tensor_parallel: TensorParallel = None,
    revision: Revision = None,
    chat_template: ChatTemplate = None,
) -> None:
    """Answer a file of prompts in this process, without a server."""
    overrides = {
        "model.source": model,
        "model.revision": revision,
        "model.chat_template": chat_template,
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
    # Loads torch, which `serve` must not wait for.
    from bakehouse_cluster import generating

    console = Console(stderr=True)
    try:
        generating.generate(load_config(config, overrides), input_path, output_path, console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", highlight=False, soft_wrap=True)
        sys.exit(INTERRUPTED)


@app.command()
def chat(
    model: Model = None,
    url: Annotated[str | None, typer.Option(help="A running server; without it the model runs in here.")] = None,
    key: Annotated[str, typer.Option(help="API key of the server.", envvar="BAKEHOUSE_API_KEY")] = "none",
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the model's own by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    config: ConfigFile = None,
    max_model_len: MaxModelLen = None,
    kv_memory: KvMemory = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    device: Device = None,
    weights: Weights = None,
    tensor_parallel: TensorParallel = None,
    revision: Revision = None,
    chat_template: ChatTemplate = None,
) -> None:
    """Talk with a model in the terminal."""
    # Load torch or the HTTP client, which the other commands must not wait for.
    from bakehouse_cluster.answerers import ChatOptions, LocalAnswerer, ServerAnswerer
    from bakehouse_cluster.chat import Answerer, converse
    from bakehouse_cluster.offline import OfflineModel

    console = Console(stderr=True)
    options = ChatOptions(temperature=temperature, max_tokens=max_tokens)
    answerer: Answerer
    if url is not None:
        answerer = ServerAnswerer(url, model=model, key=key, options=options)
    else:
        overrides = {
            "model.source": model,
            "model.chat_template": chat_template,
            "model.max_model_len": max_model_len,
            "model.dtype": dtype,
            "model.quantize": quantize,
            "model.kv_dtype": kv_dtype,
            "model.device": device,
            "model.weights": weights,
            "model.revision": revision,
            "replica.kv_memory": kv_memory,
            "replica.tensor_parallel": tensor_parallel,
        }
        tree = load_config(config, overrides)
        stages = Stages(console)
        with (
            stages.stage(f"model {tree.model.source}"),
            compiling_told(stages.note),
            captures_told(stages.note, open_source(tree.source).cache_dir),
        ):
            answerer = LocalAnswerer(OfflineModel(tree), options)
    sys.exit(converse(answerer, system=system, console=console))


def main() -> None:
    """Entry point: errors that are the user's to mend are one line, without a traceback."""
    try:
        app()
    except BakehouseError as error:
        sys.exit(f"bakehouse: {' '.join(error.message.split())}")


if __name__ == "__main__":
    main()
