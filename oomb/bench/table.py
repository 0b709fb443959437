"""The README's table, from the recorded measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def step_table(reports: list[Path]) -> str:
    """Markdown of files that `oomb bench step` wrote, both sides measured: a row per length."""
    lines = [
        "| tokens | transformers: tokens/s, GiB | OOMB: tokens/s, GiB | chunks, gradients |",
        "| ---: | ---: | ---: | --- |",
    ]
    for report in map(json.loads, map(Path.read_text, reports)):
        settings = _settings(report["settings"])
        for row in report["rows"]:
            theirs = row["transformers"]
            left = theirs.get("failed") or _speed_and_memory(theirs)
            ours = _beside(row["oomb"], theirs)
            lines.append(f"| {row['tokens']:,} | {left} | {ours} | {settings} |")
    return "\n".join(lines)


def _settings(settings: dict[str, Any]) -> str:
    found = [f"{settings['chunk']:,}, {settings['grad_dtype']}"]
    live = settings.get("live_chunks", 1)
    if live > 1:
        found.append(f"`live_chunks={live}`")
    if settings["keep_fill_outputs"]:
        found.append("`keep_fill_outputs`")
    if settings["page_grad_dtype"] != "fp32":
        found.append(f"{settings['page_grad_dtype']} page gradients")
    return ", ".join(found)


def _beside(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Our side, and how many times as fast as theirs it is."""
    if "failed" in ours:
        return ours["failed"]
    if "failed" in theirs:
        return _speed_and_memory(ours)
    return f"{_speed_and_memory(ours)} ({ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} x)"


def _speed_and_memory(run: dict[str, Any]) -> str:
    return f"{run['tokens_per_s']:,.0f}, {run['peak_gib']:.1f}"
