"""The command line `oomb`: one module per verb or group of verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from oomb.cli.bench import bench
from oomb.cli.demo import demo
from oomb.cli.plan import plan

app = typer.Typer(
    help="Train language models on long contexts by chunk recurrence, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import oomb

        typer.echo(f"oomb {oomb.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models on long contexts by chunk recurrence, exactly."""


app.command()(demo)
app.command()(plan)
app.add_typer(bench, name="bench")
