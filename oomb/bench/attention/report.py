"""How `oomb bench attention` looks."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from oomb.bench.attention.options import Shape
from oomb.bench.attention.truth import FIELDS

COLUMNS = (
    *("implementation", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s"),
    *("x cuDNN: fwd, bwd, both", "x FA2: fwd, bwd, both", "errors: out, dq, dk, dv"),
)


def show_shape(row: dict[str, Any], shape: Shape, console: Console) -> None:
    """Print one shape's table, and notes under it."""
    heads = f"{shape.heads} query and {shape.kv_heads} key/value heads of {shape.head_dim}"
    table = Table(box=box.SIMPLE_HEAD, title=f"{shape}, {heads}", title_justify="left")
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for each in row["implementations"]:
        table.add_row(
            each["name"],
            f"{each['forward_ms']:.3f}",
            _rate(each["forward_tflops"]),
            f"{each['backward_ms']:.3f}",
            _rate(each["backward_tflops"]),
            _ratios(each["times_cudnn"]),
            _ratios(each["times_fa2"]),
            _errors(each["error"]),
        )
    console.print(table)
    for each in row["implementations"]:
        if each["note"]:
            console.print(f"  {each['name']}: {each['note']}", markup=False)


def show_left_out(rows: list[dict[str, Any]], console: Console) -> None:
    """Print who is missing and why, once for all shapes alike."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for each in row["left_out"]:
            shape = f"{row['queries']} x {row['keys']}"
            reasons.setdefault((each["name"], each["reason"]), []).append(shape)
    for (name, reason), shapes in reasons.items():
        where = "" if len(shapes) == len(rows) else f" at {', '.join(shapes)}"
        console.print(f"  {name} left out{where}: {reason}", markup=False)


def _rate(tflops: float) -> str:
    return f"{tflops:.1f}" if tflops >= 10 else f"{tflops:.3f}"


def _ratios(ratios: dict[str, float] | None) -> str:
    if ratios is None:
        return "-"
    return "  ".join(f"{ratios[name]:.2f}" for name in ("forward", "backward", "both"))


def _errors(errors: dict[str, float] | None) -> str:
    if errors is None:
        return "-"
    return "  ".join(f"{errors[name]:.1e}" for name in FIELDS)
