"""How `oomb demo` looks: a bar while it works, then the figures as a short story."""

from __future__ import annotations

import math
import time
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from oomb.demo.inputs import DemoInputs


class Progress:
    """A bar in a terminal; elsewhere one line per stage, as it starts."""

    def __init__(self, console: Console) -> None:
        self.console, self._began, self._done, self._work = console, time.monotonic(), 0, 0
        self._bar: Bar | None = None
        if console.is_terminal:
            columns = TextColumn("{task.description}"), TaskProgressColumn(), TimeElapsedColumn()
            self._bar = Bar(BarColumn(bar_width=30), *columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def plan(self, work: int) -> None:
        """How much work all later stages have together, in any unit."""
        if self._bar is not None:
            self._bar.update(self._task, total=work)

    def stage(self, title: str, work: int = 0) -> None:
        """Begin a stage of `work` units; the one before is complete."""
        self._done, self._work = self._done + self._work, work
        if self._bar is not None:
            self._bar.update(self._task, description=title, completed=self._done)
        else:
            print(f"{time.monotonic() - self._began:6.1f} s  {title}", file=self.console.file)

    def advance(self, work: int, title: str) -> None:
        """Some of this stage's work is done."""
        if self._bar is not None:
            self._bar.update(self._task, description=title, advance=work)


def show_inputs(inputs: DemoInputs, console: Console) -> None:
    """Say what will be trained, on what, where."""
    options, model = inputs.options, inputs.model
    size = sum(p.numel() for p in model.parameters())
    where = "GPU" if inputs.device.type == "cuda" else "CPU"
    chunks = -(-options.context // options.chunk)
    lines = [
        f"[b]{type(model).__name__}[/b], {size / 1e6:,.1f} M parameters, fp32 on the {where}",
        f"reads {escape(inputs.train_name)}: {_steps(options.steps)} over "
        f"[b]{options.context:,} tokens[/b] each,",
        f"computed {options.chunk:,} tokens at a time ({chunks} chunk{'s' * (chunks > 1)}), "
        f"pages of {options.page}",
    ]
    if chunks == 1:
        lines.append("A single chunk needs no recurrence: a smaller --chunk shows it.")
    if console.is_terminal:
        body = Text.from_markup("\n".join(lines))
        console.print(Panel(body, title="oomb demo", title_align="left", expand=False))
    else:
        console.print(Text.from_markup("\n".join(["oomb demo", *lines])), soft_wrap=True)


def show_figures(figures: dict[str, Any], console: Console) -> None:
    """Print what the step cost both ways, whether they agree, what was learned, what is kept."""
    gradients, held_out = figures["gradients"], figures["held_out"]
    console.print(_costs(figures, console))
    _say(
        console,
        gradients["within_limit"],
        "Same gradients" if gradients["within_limit"] else "NOT the same gradients",
        f"largest relative difference over all {gradients['parameters']} parameters: "
        f"{gradients['largest_relative_difference']:.1e} (limit {gradients['limit']:.0e})",
        f"in {gradients['of']}, at {gradients['length']:,} tokens",
    )
    before, after = held_out["loss_before"], held_out["loss_after"]
    _say(
        console,
        after < before,
        "Learned" if after < before else "Not learned yet",
        f"loss {before:.4f} before, {after:.4f} after {_steps(figures['steps'])},",
        f"on {figures['text']['held_out']}: {held_out['tokens']:,} tokens, none trained on",
    )
    _say(console, True, "Recorded", figures["recording"])


def _say(console: Console, good: bool, title: str, *lines: str) -> None:
    """One finding: a mark, a title, and what it says."""
    signs = "✓✗" if console.encoding.startswith("utf") else "+!"
    mark = Text(f"{signs[0]} ", "bold green") if good else Text(f"{signs[1]} ", "bold red")
    console.print(mark + Text(f"{title}: ", "bold") + Text(lines[0]), soft_wrap=True)
    for line in lines[1:]:
        console.print(Text(f"  {line}", "dim"), soft_wrap=True)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _costs(figures: dict[str, Any], console: Console) -> Table:
    """Both ways side by side: live bytes and seconds of one step."""
    live, seconds = figures["live_bytes"], figures["seconds"]
    whole, ours, chunk_seconds = live["whole"], live["by_chunks"], seconds["by_chunks"]
    table = Table(box=box.ROUNDED if console.is_terminal else box.ASCII2)
    table.add_column("one training step")
    table.add_column("whole", justify="right")
    table.add_column("by chunks", justify="right", style="bold")
    table.add_row("tokens", f"{whole['length']:,}", f"{ours['length']:,}")
    ratio = whole["activations"] / ours["activations"]
    table.add_row(
        "activations alive",
        human_bytes(whole["activations"]),
        f"{human_bytes(ours['activations'])}, {ratio:.1f}x less"
        if ratio > 1
        else human_bytes(ours["activations"]),
    )
    pages = human_bytes(ours["kv_pages"] + ours["page_gradients"])
    table.add_row("pages: K/V and gradients", "-", pages)
    timed = chunk_seconds[1:] or chunk_seconds  # the first step also counted bytes
    average = sum(timed) / len(timed)
    table.add_row("seconds, about", f"{seconds['whole']:.1f}", f"{average:.1f}")
    if whole["length"] < ours["length"]:
        need, free = live["whole_at_context_estimate"], live["free"]
        table.caption = (
            f"{ours['length']:,} tokens whole need about {human_bytes(need)}; "
            f"{human_bytes(free)} are free"
        )
    return table


def human_bytes(count: int) -> str:
    """1536 -> 1.5 KiB."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def without_infinities(value: Any) -> Any:
    """`value` for JSON, which has neither infinity nor NaN: both become null."""
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
