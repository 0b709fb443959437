"""Pictures of attention kernels: where pages lie, and how fast each rung of the ladder is."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from oomb_widgets.picture import COLOURS, Picture, new_figure, style


def page_lookup(slots: Sequence[int], pool: int) -> Picture:
    """Draw a page table: logical pages above, the pool's slots below, a line for each entry.

    Args:
        slots: Slot of each logical page.
        pool: How many slots the pool has.

    Returns:
        The two rows, and which page lies where.
    """
    with style():
        figure = new_figure(7.2, 2.4)
        ax = figure.subplots()
        shift = (pool - len(slots)) / 2
        for page, slot in enumerate(slots):
            left = shift + page
            ax.plot((left + 0.5, slot + 0.5), (1.6, 1), color=COLOURS["kv_pages"], lw=1.4)
            ax.add_patch(Rectangle((left, 1.6), 0.9, 0.8, color=COLOURS["kv_pages"]))
            ax.text(left + 0.45, 2.0, str(page), ha="center", va="center", color="white")
        for slot in range(pool):
            held = slot in slots
            box = Rectangle((slot, 0.2), 0.9, 0.8, facecolor="none", edgecolor=COLOURS["text"])
            if held:
                box = Rectangle((slot, 0.2), 0.9, 0.8, color=COLOURS["kv_pages"], alpha=0.75)
            ax.add_patch(box)
            if held:
                ax.text(slot + 0.45, 0.6, str(list(slots).index(slot)), ha="center", va="center",
                        color="white")  # fmt: skip
            ax.text(slot + 0.45, 0.05, str(slot), ha="center", va="top", size=8)
        ax.text(-0.4, 2.0, "pages, in the order of tokens", ha="right", va="center")
        ax.text(-0.4, 0.6, "slots of the pool", ha="right", va="center")
        ax.set(xlim=(-0.5, pool), ylim=(-0.4, 2.5))
        ax.axis("off")
    where = ", ".join(f"page {page} in slot {slot}" for page, slot in enumerate(slots))
    return Picture(figure, f"The page table of {len(slots)} pages in a pool of {pool}: {where}.")


def kernel_ladder(report: Mapping[str, Any], way: str, guess: float | None = None) -> Picture:
    """Draw the rungs of a recorded ladder as bars, beside the vendor's kernel and the ceiling.

    Args:
        report: What `oomb.bench.ladder` wrote.
        way: forward or backward.
        guess: TFLOP/s that the reader guessed for one of the rungs.

    Returns:
        A bar for each rung.
    """
    rungs = [rung for rung in report["rungs"] if rung["way"] == way]
    bars = [(rung["name"], rung["tflops"], COLOURS["fill"]) for rung in rungs]
    bars += [(name, both[way], COLOURS["ordinary"]) for name, both in report["beside"].items()]
    bars.append(("matrix product", report["ceiling"], COLOURS["limit"]))
    with style():
        figure = new_figure(7.2, 0.36 * len(bars) + 0.9)
        ax = figure.subplots()
        for row, (name, tflops, colour) in enumerate(reversed(bars)):
            ax.barh(row, tflops, color=colour, height=0.66)
            ax.text(tflops + 8, row, f"{tflops:.0f}", va="center")
            ax.text(-8, row, name, va="center", ha="right")
        if guess is not None:
            ax.axvline(guess, color=COLOURS["guess"], lw=1.8)
            ax.text(guess, len(bars) - 0.4, f"your guess: {guess:g}", color=COLOURS["guess"],
                    ha="center", va="bottom")  # fmt: skip
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.set_xlim(0, 1.08 * report["ceiling"])
        ax.set_xlabel(f"TFLOP/s {way}, {report['gpu']}, {report['date']}")
    said = "; ".join(f"{name} {tflops:.0f}" for name, tflops, _ in bars)
    return Picture(figure, f"The {way} ladder in TFLOP/s: {said}.")
