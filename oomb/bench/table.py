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
