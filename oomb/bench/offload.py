"""`oomb bench offload`: the same step with its pages on the GPU and on the host."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from oomb.bench.step.options import StepSettings
from oomb.bench.step.report import show_settings
from oomb.bench.step.run import measure_side
from oomb.bench.step.sample import ESTIMATED
from oomb.bench.step.sides import OURS

RESIDENT, OFFLOADED = "resident", "offloaded"
MOST_APART = 0.005
GROWTH_TOKENS = 10_000
MB = 1e6
GIB = 2**30
HOW = (
    "A step is forward and backward of one sequence, no optimizer; weights and tokens are random "
    "and the same both times. Each way runs in a process of its own, one after the other; then one "
    "more step is recorded. Hidden share: 1 - time that kernels waited for copies / time that "
    "copies took; by difference: 1 - what the offloaded step takes longer / time that copies took."
)
COLUMNS = (
    *("tokens", "resident tokens/s", "offloaded", "time ratio", "hidden", "by difference"),
    *("GB/s in", "out", "resident GiB", "offloaded GiB", "planned", "host GiB", "held / planned"),
    *("recording costs", "agree"),
)


def run(settings: StepSettings, resident: bool, command: str, console: Console) -> dict[str, Any]:
    """Measure and print.

    Args:
        settings: the offloaded step.
        resident: whether to measure the resident one too.
        command: the command line, for the record.
        console: where the table goes.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: the engine refuses the settings on this device.
    """
    show_settings(settings, console)
    ways = {OFFLOADED: settings}
    if resident:
        ways = {RESIDENT: replace(settings, offload=False, gpu_budget=0.0), **ways}
    sides = {}
    for name, each in ways.items():
        console.print(f"{name} ...", markup=False)
        sides[name] = measure_side(OURS, each)
    report = {
        **next((side["machine"] for side in sides.values() if side["machine"]), {}),
        "command": command,
        "how": HOW,
        "settings": settings.plain(),
        "sides": {name: side["facts"] for name, side in sides.items()},
        "rows": [
            {"tokens": tokens, **row({name: side["rows"][tokens] for name, side in sides.items()})}
            for tokens in settings.lengths
        ],
    }
    report["growth_mb"] = growth(report["rows"])
    show(report, console)
    return report


def row(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare one length.

    Args:
        figures: by way, what its process measured, or why it `failed`.

    Returns:
        `figures`, and beside them `time_ratio`, `hidden_share`, `hidden_by_difference`,
        `held_over_planned` and `agrees`, None where they cannot be told.
    """
    ours, other = figures[OFFLOADED], figures.get(RESIDENT, {"failed": "not run"})
    found: dict[str, Any] = dict.fromkeys(
        ("time_ratio", "hidden_share", "hidden_by_difference", "held_over_planned", "agrees")
    )
    if "failed" in ours:
        return figures | found
    recorded = ours["recorded"]
    found["hidden_share"] = recorded["hidden_share"]
    if ours["planned_host_gib"]:
        found["held_over_planned"] = ours["host_gib"] / ours["planned_host_gib"]
    if "failed" in other:
        return figures | found
    found["time_ratio"] = other["tokens_per_s"] / ours["tokens_per_s"]
    busy = recorded["copy_in"]["seconds"] + recorded["copy_out"]["seconds"]
    if busy and "estimated" not in ours:
        longer = _seconds(ours) - _seconds(other)
        found["hidden_by_difference"] = 1 - longer / busy
    if ours["loss"] is not None:
        found["agrees"] = all(
            abs(ours[each] / other[each] - 1) <= MOST_APART for each in ("loss", "grad_norm")
        )
    return figures | found


def growth(rows: list[dict[str, Any]]) -> list[float | None]:
    """From each length to the next, MB by which the offloaded peak grows per 10,000 tokens."""
    found: list[float | None] = []
    for before, after in itertools.pairwise(rows):
        peaks = [each[OFFLOADED].get("peak_gib") for each in (before, after)]
        if None in peaks or before["tokens"] == after["tokens"]:
            found.append(None)
        else:
            more = (peaks[1] - peaks[0]) * GIB / MB
            found.append(more / (after["tokens"] - before["tokens"]) * GROWTH_TOKENS)
    return found


def failed(report: dict[str, Any]) -> bool:
    """Whether the two ways disagree, or one ended for other reasons than memory."""
    return any(
        row["agrees"] is False
        or any("exit code" in row.get(way, {}).get("failed", "") for way in (RESIDENT, OFFLOADED))
        for row in report["rows"]
    )


def show(report: dict[str, Any], console: Console) -> None:
    """Print one line per length, and how the peak grows."""
    where = report.get("gpu") or report.get("machine")
    console.print(f"on {where}, torch {report.get('torch')}", markup=False)
    if report.get("gpu") is None:
        console.print("  simulated: threads stand for the copy engines of a GPU", markup=False)
    table = Table(box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for each in report["rows"]:
        table.add_row(f"{each['tokens']:,}", *_cells(each))
    console.print(table)
    if any("estimated" in each[OFFLOADED] for each in report["rows"]):
        console.print(f"  ~ {ESTIMATED}: no step was run", markup=False)
    for (before, after), grown in zip(
        itertools.pairwise(report["rows"]), report["growth_mb"], strict=True
    ):
        if grown is not None:
            said = f"{grown:+.2f} MB per {GROWTH_TOKENS:,} tokens"
            console.print(
                f"  offloaded peak from {before['tokens']:,} to {after['tokens']:,}: {said}",
                markup=False,
            )


def _seconds(figures: dict[str, Any]) -> float:
    return sum(figures["step_seconds"]) / len(figures["step_seconds"])


def _cells(row: dict[str, Any]) -> list[str]:
    ours, other = row[OFFLOADED], row.get(RESIDENT, {"failed": "not run"})
    rates = [figures.get("failed") or _rate(figures) for figures in (other, ours)]
    if "failed" in ours:
        return rates
    recorded = ours["recorded"]
    cost = "-" if "estimated" in ours else f"{recorded['seconds'] / _seconds(ours) - 1:+.1%}"
    return [
        *rates,
        _number(row["time_ratio"], ".3f"),
        _number(row["hidden_share"], ".1%"),
        _number(row["hidden_by_difference"], ".1%"),
        *(_number(_bandwidth(recorded[kind]), ".1f") for kind in ("copy_in", "copy_out")),
        _number(other.get("peak_gib"), ".2f"),
        _number(ours["peak_gib"], ".2f"),
        _number(ours["planned_gib"], ".2f"),
        _number(ours["host_gib"], ".2f"),
        _number(row["held_over_planned"], ".4f"),
        cost,
        {True: "yes", False: "NO", None: "-"}[row["agrees"]],
    ]


def _rate(figures: dict[str, Any]) -> str:
    return ("~" if "estimated" in figures else "") + f"{figures['tokens_per_s']:,.0f}"


def _bandwidth(copies: dict[str, float]) -> float | None:
    return copies["gib"] * GIB / 1e9 / copies["seconds"] if copies["seconds"] else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
