"""How benchmarks print: a table is never cut, wherever it goes."""

from __future__ import annotations

from rich.console import Console

TABLE_WIDTH = 150
"""Columns of the widest table; a narrower terminal wraps its lines, and every number is there."""
FILE_WIDTH = 200


def make_console() -> Console:
    """As wide as the terminal but never too narrow for a table; in a file, wider still."""
    console = Console(highlight=False)
    width = max(TABLE_WIDTH, console.width) if console.is_terminal else FILE_WIDTH
    return Console(highlight=False, width=width)
