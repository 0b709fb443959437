"""All of `oomb bench step`: each side in a process of its own, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from oomb.bench.inputs import InputError
from oomb.bench.step.flops import StepFlops
from oomb.bench.step.options import StepSettings
from oomb.bench.step.report import APART, show_lengths, show_settings, show_splits
from oomb.bench.step.roofline import Rates, least_seconds
from oomb.bench.step.sides import OURS, THEIRS

MOST_APART = 0.005
HOW = (
    "A step is forward and backward of one sequence, no optimizer; weights and tokens are random "
    "and the same on both sides. Each side runs in a process of its own, one after the other, and "
    "repeats its step until the asked time is over. Roofline: the operations that a side computes, "
    "at the rates that the GPU sustains. Utilisation: the operations that an ordinary step needs, "
    "nothing computed twice, at the GPU's peak."
)
STDERR = 2


def run(settings: StepSettings, peer: bool, command: str, console: Console) -> dict[str, Any]:
    """Measure and print.

    Args:
        settings: what to measure.
        peer: whether to measure transformers too.
        command: the command line, for the record.
        console: where tables go.

    Returns:
        A JSON-ready report.

    Raises:
        InputError: the engine refuses the settings on this device.
    """
    sides = {}
    show_settings(settings, console)
    for name in (OURS, THEIRS) if peer and not settings.sample else (OURS,):
        console.print(f"{name} ...", markup=False)
        sides[name] = measure_side(name, settings)
    machine = next((side["machine"] for side in sides.values() if side["machine"]), {})
    rates = next((side["rates"] for side in sides.values() if side["rates"]), None)
    report = {
        **machine,
        "command": command,
        "how": HOW,
        "settings": settings.plain(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "rates_tflops": rates,
        "sides": {name: side["facts"] for name, side in sides.items()},
        "rows": [_row(tokens, sides, rates) for tokens in settings.lengths],
    }
    show_lengths(report, console)
    show_splits(report, console)
    return report


def disagree(report: dict[str, Any]) -> bool:
    """Whether loss or gradient norm of the two sides differ at some length."""
    return any(row["agrees"] is False for row in report["rows"])


def broken(report: dict[str, Any]) -> bool:
    """Whether OOMB's side ended without a result for other reasons than memory."""
    return any("exit code" in row[OURS].get("failed", "") for row in report["rows"])


def measure_side(name: str, settings: StepSettings) -> dict[str, Any]:
    """Run a side in processes of its own; one that dies is followed by one for the lengths left.

    Args:
        name: of the side.
        settings: what to measure.

    Returns:
        What the processes wrote: `machine`, `rates`, `facts`, and `rows` by tokens.

    Raises:
        InputError: the engine refuses the settings on this device.
    """
    side: dict[str, Any] = {"machine": None, "rates": None, "facts": {}, "rows": {}}
    rows = side["rows"]
    while left := [tokens for tokens in settings.lengths if tokens not in rows]:
        code = _run_child(name, replace(settings, lengths=left), side)
        if "refused" in side:
            raise InputError(f"{side['refused']}.")
        missing = [tokens for tokens in left if tokens not in rows]
        if missing:
            rows[missing[0]] = {"failed": f"exit code {code}"}
    return side


def _run_child(name: str, settings: StepSettings, side: dict[str, Any]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        arguments = [name, json.dumps(settings.plain()), str(path)]
        # Only tables go to stdout.
        code = subprocess.run(
            [sys.executable, "-m", "oomb.bench.step.child", *arguments],
            stdout=STDERR,
            check=False,
        ).returncode
        for line in path.read_text().splitlines() if path.exists() else ():
            found = json.loads(line)
            tokens = found.pop("tokens", None)
            if tokens is None:
                side |= found
            else:
                side["rows"][tokens] = found
    return code


def _row(tokens: int, sides: dict[str, Any], rates: dict[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": tokens, "speed_ratio": None, "agrees": None}
    for name, side in sides.items():
        row[name] = side["rows"][tokens]
        if rates is not None and "failed" not in row[name]:
            row[name] |= _shares(row[name], tokens, Rates(**rates))
    if THEIRS in row and "failed" not in row[OURS] and "failed" not in row[THEIRS]:
        row["speed_ratio"] = row[OURS]["tokens_per_s"] / row[THEIRS]["tokens_per_s"]
        row["apart"] = {name: abs(row[OURS][name] / row[THEIRS][name] - 1) for name in APART}
        row["agrees"] = all(apart <= MOST_APART for apart in row["apart"].values())
    return row


def _shares(figures: dict[str, Any], tokens: int, rates: Rates) -> dict[str, float]:
    """How near to the roofline a side came, and how much of the peak was of use."""
    seconds = tokens / figures["tokens_per_s"]
    computed = StepFlops(**figures["computed_flops"])
    useful = StepFlops(**figures["useful_flops"])
    return {
        "share_of_roofline": least_seconds(computed, rates) / seconds,
        "utilisation": useful.total / seconds / (1e12 * rates.peak),
    }
