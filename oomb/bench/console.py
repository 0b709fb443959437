"""How benchmarks print: a table is never cut, wherever it goes."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 200


def make_console() -> Console:
    """As wide as the terminal; in a file, wide enough for every table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)
