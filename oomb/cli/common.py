"""What several commands share: options, refusals, and files that appear whole."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from oomb.whole_file import whole_file

KeepFillOutputs = Annotated[
    bool, typer.Option(help="Keep the fill's attention outputs for the sweep.")
]
Offload = Annotated[bool, typer.Option(help="Let pages live in host memory.")]
GpuBudget = Annotated[float, typer.Option(help="GiB of pages that stay on the GPU with --offload.")]
PageDtype = Annotated[str, typer.Option(help="Of K and V in pages: model or fp8.")]
PageGradRounding = Annotated[
    str, typer.Option(help="Of bf16 gradients in pages: stochastic or nearest.")
]
Seconds = Annotated[float, typer.Option(help="Repeat each step for this long.")]


def command_line() -> str:
    """The command that was run, less where its output went."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["oomb", *(word for word in words if not word.startswith("--out="))])


@contextmanager
def refusals() -> Iterator[None]:
    """Inside, bad input is one sentence and exit code 2."""
    from oomb.demo.inputs import InputError

    try:
        yield
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("Stopped before the end.", err=True)
        raise typer.Exit(130) from None


def write_json(path: Path, figures: dict) -> None:
    """Write `figures`, infinities as null; the file appears whole or not at all."""
    from oomb.demo.report import without_infinities

    text = json.dumps(without_infinities(figures), indent=1, allow_nan=False) + "\n"
    with whole_file(path) as part:
        part.write_text(text)
