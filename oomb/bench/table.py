"""The README's table, from the recorded measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def agreement_table(report: Path) -> str:
    """Markdown of a file that `oomb.bench.agreement` wrote: a row per length."""
    content = json.loads(report.read_text())
    lines = [
        "| tokens | transformers: tokens/s, GiB | OOMB: tokens/s, GiB | gradient norms |",
        "| ---: | ---: | ---: | --- |",
    ]
    for row in content["rows"]:
        ordinary = row["ordinary"]
        fits = isinstance(ordinary, dict)
        theirs = _speed_and_memory(ordinary) if fits else ordinary
        norms = f"{ordinary['grad_norm']:.3f} and " if fits else ""
        norms += f"{row['grad_norm']:.3f}"
        lines.append(f"| {row['tokens']:,} | {theirs} | {_speed_and_memory(row)} | {norms} |")
    return "\n".join(lines)


def _speed_and_memory(run: dict[str, Any]) -> str:
    return f"{run['tokens_per_s']:,.0f}, {run['peak_gib']:.1f}"


def step_table(lean: list[Path], fast: list[Path]) -> str:
    """Markdown of files that `oomb bench step` wrote: a row per length.

    Args:
        lean: reports that hold both sides.
        fast: reports of the same lengths with the fill's outputs kept; transformers is taken from
            `lean` where they lack it.
    """
    quick = {row["tokens"]: row["oomb"] for report in fast for row in _rows(report)}
    lines = [
        "| tokens | transformers: tokens/s, GiB | OOMB, lean: tokens/s, GiB | "
        "OOMB, fast: tokens/s, GiB |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in (row for report in lean for row in _rows(report)):
        theirs = row["transformers"]
        cells = [theirs.get("failed") or _speed_and_memory(theirs), _beside(row["oomb"], theirs)]
        cells.append(_beside(quick[row["tokens"]], theirs) if row["tokens"] in quick else "")
        lines.append(f"| {row['tokens']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rows(report: Path) -> list[dict[str, Any]]:
    return json.loads(report.read_text())["rows"]


def _beside(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Our side, and how many times as fast as theirs it is."""
    if "failed" in ours:
        return ours["failed"]
    if "failed" in theirs:
        return _speed_and_memory(ours)
    return f"{_speed_and_memory(ours)} ({ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} x)"
