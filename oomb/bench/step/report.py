"""How `oomb bench step` looks."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from oomb.bench.step.options import StepSettings
from oomb.bench.step.sample import ESTIMATED
from oomb.bench.step.sides import OURS, SIDES
from oomb.bench.step.split import CLASSES

COLUMNS = (
    *(
        "tokens",
        "side",
        "tokens/s",
        "x transformers",
        "peak GiB",
        "steps",
        "loss",
        "grad norm",
        "agree",
    ),
    *("of roofline", "utilisation"),
)
APART = ("loss", "grad_norm")
"""Figures in which the two sides must agree."""
SHARES = ("share_of_roofline", "utilisation")
TOP_SHOWN = 8


def show_settings(settings: StepSettings, console: Console) -> None:
    """Say what is about to be measured."""
    said = ", ".join(f"{name} {value}" for name, value in settings.plain().items())
    console.print(f"oomb bench step: {said}", markup=False)


def show_lengths(report: dict[str, Any], console: Console) -> None:
    """Print how each side ran, and two lines per length."""
    where = report.get("gpu") or report.get("machine")
    console.print(f"on {where}, torch {report.get('torch')}", markup=False)
    if report.get("gpu") is None:
        console.print("  a CPU and a toy: this shows that it runs, not how fast", markup=False)
    for name, facts in report["sides"].items():
        said = ", ".join(f"{key} {_plain(value)}" for key, value in facts.items())
        console.print(f"  {name}: {said}", markup=False)
    if report["rates_tflops"]:
        rates = report["rates_tflops"]
        said = ", ".join(_rate(name, value) for name, value in rates.items() if name != "source")
        console.print(f"  roofline in TFLOP/s ({rates['source']}): {said}", markup=False)
    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number == 1 else "right", no_wrap=True)
    for row in report["rows"]:
        for name in _sides(row):
            table.add_row(f"{row['tokens']:,}", name, *_cells(row, name))
    console.print(table)
    if any("estimated" in row[OURS] for row in report["rows"]):
        console.print(f"  ~ {ESTIMATED}: no step was run", markup=False)


def show_splits(report: dict[str, Any], console: Console) -> None:
    """Print where the time of a profiled step went."""
    measured = [
        (row["tokens"], name, row[name]["split"])
        for row in report["rows"]
        for name in _sides(row)
        if "split" in row[name]
    ]
    if not measured:
        return
    table = Table(
        box=box.SIMPLE_HEAD, title="GPU seconds of one profiled step", title_justify="left"
    )
    for number, name in enumerate(("tokens", "side", *CLASSES, "idle", "all", "kernels")):
        table.add_column(name, justify="left" if number == 1 else "right", no_wrap=True)
    for tokens, name, split in measured:
        seconds = [f"{split['seconds'][each]:.3f}" for each in (*CLASSES, "idle")]
        kernels = f"{split['kernels']:,}"
        table.add_row(f"{tokens:,}", name, *seconds, f"{split['span']:.3f}", kernels)
    console.print(table)
    for tokens, name, split in measured:
        console.print(f"  {name}, {tokens:,} tokens, the longest kernels:", markup=False)
        for kind, kernel, seconds, count in split["top"][:TOP_SHOWN]:
            console.print(f"    {seconds:8.3f} s {count:7,} x {kind:9} {kernel}", markup=False)


def _sides(row: dict[str, Any]) -> list[str]:
    return [name for name in SIDES if name in row]


def _cells(row: dict[str, Any], name: str) -> list[str]:
    figures = row[name]
    if "failed" in figures:
        return [figures["failed"]]
    ours = name == OURS
    ratio = f"{row['speed_ratio']:.3f}" if ours and row["speed_ratio"] else ""
    agree = {True: "yes", False: "NO", None: ""}[row["agrees"] if ours else None]
    return [
        ("~" if "estimated" in figures else "") + f"{figures['tokens_per_s']:,.0f}",
        ratio,
        _memory(figures),
        str(len(figures["step_seconds"])),
        *("-" if figures[each] is None else f"{figures[each]:.5g}" for each in APART),
        agree,
        *(f"{figures[share]:.1%}" if share in figures else "-" for share in SHARES),
    ]


def _memory(figures: dict[str, Any]) -> str:
    peak = "-" if figures["peak_gib"] is None else f"{figures['peak_gib']:.1f}"
    host = figures.get("host_gib")
    return f"{peak} + {host:.1f} host" if host else peak


def _plain(value: Any) -> str:
    return "+".join(value) or "none" if isinstance(value, list) else str(value)


def _rate(name: str, value: float) -> str:
    return f"{name.replace('_', ' ')} {value:.4g}"
