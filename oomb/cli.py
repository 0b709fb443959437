"""The command line: `oomb demo`."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to train and, at its end, test on.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a transformers causal LM and its tokenizer.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each training step.")] = 16384,
    chunk: Annotated[int, typer.Option(help="Tokens computed at once.")] = 2048,
    page: Annotated[int, typer.Option(help="Tokens of one K/V page; divides --chunk.")] = 128,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 3,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 5e-4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    out: Annotated[Path, typer.Option(help="Write the recording to this file.")] = Path(
        "demo.oomb"
    ),
) -> None:
    """Fine-tune a model over a long context, and compare with running it whole.

    Without --text and --model it takes the gospels and the small model that ship with OOMB.

    Exit code 1: a gradient differs by more than 1e-5. Exit code 2: bad input, nothing was done.
    """
    # Threads that spin while they wait would lose a core to any other busy program.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Imported here, so that --help and --version do not wait for PyTorch and transformers.
    from oomb.demo.inputs import DemoOptions, InputError, load
    from oomb.demo.report import Progress, show_figures, show_inputs, without_infinities
    from oomb.demo.run import run

    console = Console(highlight=False)
    try:
        inputs = load(
            DemoOptions(
                text=text, model=model, context=context, chunk=chunk, page=page, steps=steps,
                lr=lr, device=device, json=json, out=out,
            )
        )  # fmt: skip
        show_inputs(inputs, console)
        with Progress(console) as progress:
            figures = run(inputs, progress)
        if json is not None:
            write_json(json, without_infinities(figures))
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("Stopped before the end.", err=True)
        raise typer.Exit(130) from None
    show_figures(figures, console)
    if not figures["gradients"]["within_limit"]:
        raise typer.Exit(1)


def write_json(path: Path, figures: dict) -> None:
    """Write `figures`; the file appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json_module.dumps(figures, indent=1, allow_nan=False) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    app()
