"""`oomb demo`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oomb.cli.common import refusals, write_json


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
    from oomb.demo.inputs import DemoOptions, load
    from oomb.demo.report import Progress, show_figures, show_inputs
    from oomb.demo.run import run

    console = Console(highlight=False)
    with refusals():
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
            write_json(json, figures)
    show_figures(figures, console)
    if not figures["gradients"]["within_limit"]:
        raise typer.Exit(1)
