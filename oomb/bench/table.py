"""The README's table, from the recorded measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def step_table(reports: list[Path]) -> str:
    """Markdown of files that `oomb bench step` wrote, both sides measured: a row per length."""
    lines = [
        "| tokens | transformers: tokens/s, GiB | OOMB: tokens/s, GiB |",
        "| ---: | ---: | ---: |",
    ]
    for row in (row for report in reports for row in _rows(report)):
        theirs = row["transformers"]
        left = theirs.get("failed") or _speed_and_memory(theirs)
        lines.append(f"| {row['tokens']:,} | {left} | {_beside(row['oomb'], theirs)} |")
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


def _speed_and_memory(run: dict[str, Any]) -> str:
    return f"{run['tokens_per_s']:,.0f}, {run['peak_gib']:.1f}"
