"""`bakehouse config`: its commands."""

from pathlib import Path
from typing import Annotated

import typer

from bakehouse_cluster import plain_yaml
from bakehouse_cluster.config import read_tree
from bakehouse_cluster.serve_config import Target, serve_config

app = typer.Typer(no_args_is_help=True, help="Check a configuration, or show the document that deploys it.")

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file; the defaults without it.")]
WhereTo = Annotated[Target, typer.Option(help="Where it is deployed.")]


@app.command()
def render(config: ConfigFile = None, target: WhereTo = "kubernetes") -> None:
    """Print the document for `serve deploy`, which is also a RayService's serveConfigV2."""
    document = serve_config({} if config is None else read_tree(config), target)
    typer.echo(plain_yaml.dump(document), nl=False)


@app.command()
def check(config: ConfigFile = None, target: WhereTo = "kubernetes") -> None:
    """Say in one line whether a configuration is right, and what is wrong with it otherwise."""
    serve_config({} if config is None else read_tree(config), target)
    typer.echo(f"{config or 'the default configuration'}: good")
