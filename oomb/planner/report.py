"""How `oomb plan` looks."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from oomb.planner.memory import GIB, USABLE, Machine, Plan


def as_json(
    plan: Plan, machine: Machine, longest: int, changed: list[tuple[str, Plan]]
) -> dict[str, Any]:
    """The plan as plain data; bytes throughout."""
    return {
        "context": plan.context,
        "machine": {"name": machine.name, "gpu": machine.gpu, "host": machine.host},
        "gpu": plan.gpu,
        "gpu_peak": plan.gpu_peak,
        "host": plan.host,
        "host_total": plan.host_total,
        "fits": plan.fits(machine),
        "longest_context": longest,
        "changes": [
            {"change": name, "gpu_peak": other.gpu_peak, "host_total": other.host_total}
            for name, other in changed
        ],
    }


def show(
    plan: Plan,
    machine: Machine,
    longest: int,
    changed: list[tuple[str, Plan]],
    console: Console,
) -> None:
    """Print where every byte goes, whether it fits, and what would make it."""
    console.print(f"One step over {plan.context:,} tokens on {machine.name}:", markup=False)
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("", footer="at the peak")
    table.add_column("GPU GiB", justify="right", footer=_gib(plan.gpu_peak))
    table.add_column("host GiB", justify="right", footer=_gib(plan.host_total))
    for name in dict.fromkeys([*plan.gpu, *plan.host]):
        row = [_gib(where.get(name, 0)) for where in (plan.gpu, plan.host)]
        if any(row):
            table.add_row(name, *row)
    console.print(table)
    room = f"{USABLE:.0%} of the GPU's {machine.gpu / GIB:.1f} GiB"
    room += f" and the host's {machine.host / GIB:.1f} GiB"
    console.print(f"It {'fits' if plan.fits(machine) else 'does not fit'} into {room}.")
    if longest:
        console.print(f"The longest context that fits with these settings: {longest:,} tokens.")
    else:
        console.print("With these settings not even one chunk fits.")
    if not plan.fits(machine):
        for name, other in changed:
            memory = f"{_gib(other.gpu_peak)} GiB on the GPU"
            memory += f", {_gib(other.host_total)} on the host" if other.host_total else ""
            console.print(f"  it fits with {name}: {memory}", markup=False)
        if not changed:
            console.print("  no single change of the settings is enough: combine several")


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count else ""
