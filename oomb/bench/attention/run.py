"""All of `oomb bench attention`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from oomb.bench.attention.measure import measure_shape
from oomb.bench.attention.options import AttentionSettings
from oomb.bench.attention.report import show_left_out, show_shape
from oomb.bench.machine import machine_facts

HOW = (
    "Medians of runs taken in turns. FLOPs: 4 H N S D forward, 2.5 times that backward, half of "
    "both under a diagonal. oomb reads K and V from pages and adds to page gradients; errors are "
    "against fp64; x cuDNN and x FA2 say how many times as fast."
)


def run(settings: AttentionSettings, command: str, console: Console) -> dict[str, Any]:
    """Measure and print every shape.

    Args:
        settings: what to measure.
        command: the command line, for the record.
        console: where tables go.

    Returns:
        A JSON-ready report.
    """
    facts = machine_facts(settings.device)
    where = facts["gpu"] or facts["machine"]
    console.print(f"oomb bench attention on {where}, torch {facts['torch']}", markup=False)
    console.print(HOW, markup=False)
    report: dict[str, Any] = {**facts, "command": command, "how": HOW, "settings": _plain(settings)}
    report["rows"] = rows = []
    for shape in settings.shapes:
        rows.append(measure_shape(shape, settings))
        show_shape(rows[-1], shape, console)
    show_left_out(rows, console)
    return report


def failed(report: dict[str, Any]) -> bool:
    """Whether one of OOMB's own backends raised."""
    return any(each.get("failed") for row in report["rows"] for each in row["left_out"])


def _plain(settings: AttentionSettings) -> dict[str, Any]:
    names = ("device", "dtype", "page_grad_dtype")
    plain = {name: value for name, value in asdict(settings).items() if name != "shapes"}
    return {**plain, **{name: str(plain[name]).removeprefix("torch.") for name in names}}
