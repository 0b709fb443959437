"""The README's tables, from the recorded measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def step_table(reports: list[Path]) -> str:
    """Markdown of files that `oomb bench step` wrote, both sides measured: rows by length."""
    lines = [
        "| tokens | transformers tokens/s | GiB | OOMB tokens/s | GiB | ratio | chunk, settings |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    found = []
    for report in map(json.loads, map(Path.read_text, reports)):
        settings = _settings(report["settings"])
        found += [(row["tokens"], _cells(row), settings) for row in report["rows"]]
    for tokens, cells, settings in sorted(found, key=lambda each: each[0]):
        lines.append("| " + " | ".join([f"{tokens:,}", *cells, settings]) + " |")
    return "\n".join(lines)


def pages_table(report: dict[str, Any]) -> str:
    """Rows in Markdown of a report of `oomb bench pages`: bytes and error, by option."""
    options: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        options.setdefault(row["option"], []).append(row)
    lines = []
    for name, rows in options.items():
        saved = (rows[0][key] for key in ("page_bytes_per_token", "page_bytes_per_token_full"))
        errors = (f"{100 * row['parameters']['all']['error']:.2g} %" for row in rows)
        cosine = f"{rows[-1]['parameters']['all']['cosine']:.4f}"
        cells = [name, " of ".join(f"{each:,.0f}" for each in saved), *errors, cosine]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _settings(settings: dict[str, Any]) -> str:
    """What the engine was told beside the length: its chunk, and what differs from the defaults."""
    found = [f"{settings['chunk']:,}"]
    live = settings.get("live_chunks", 1)
    found += [f"`live_chunks={live}`"] if live > 1 else []
    found += ["`keep_fill_outputs`"] if settings["keep_fill_outputs"] else []
    found += ["fp8 pages"] if settings.get("page_dtype", "model") == "fp8" else []
    low = [
        name
        for name, key in (("weight", "grad_dtype"), ("page", "page_grad_dtype"))
        if settings[key] != "fp32"
    ]
    found += [f"bf16 {' and '.join(low)} gradients"] if low else []
    if settings["page_grad_dtype"] == "bf16":  # before it could be said, all was to nearest
        rounding = settings.get("page_grad_rounding", "nearest")
        found += [f"`page_grad_rounding='{rounding}'`"] if rounding != "stochastic" else []
    return ", ".join(found)


def _cells(row: dict[str, Any]) -> list[str]:
    """Speed and memory of both sides, and how many times as fast ours is."""
    ours, theirs = row["oomb"], row["transformers"]
    both = "failed" not in ours and "failed" not in theirs
    ratio = f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f}" if both else ""
    return [*_speed_and_memory(theirs), *_speed_and_memory(ours), ratio]


def _speed_and_memory(run: dict[str, Any]) -> list[str]:
    if "failed" in run:
        return [run["failed"], ""]
    return [f"{run['tokens_per_s']:,.0f}", f"{run['peak_gib']:.1f}"]
