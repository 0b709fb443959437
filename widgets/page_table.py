"""The page table: which pages are held, where, and which have all their gradient terms."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from oomb_widgets.picture import COLOURS, Picture, new_figure, style


class _PageTable(Protocol):
    page_size: int
    slots: np.ndarray
    terms: np.ndarray


class _ChunkState(Protocol):
    phase: str
    chunk: int
    num_chunks: int
    page_table: _PageTable


def page_film(states: Sequence[_ChunkState], chunk_size: int, row: int = 0) -> Picture:
    """Draw one line of pages for each state: what is held, and how full its gradients are.

    Args:
        states: What `Engine.iter_step` yielded, in order.
        chunk_size: Tokens in a chunk.
        row: Which sequence of the batch.

    Returns:
        A blue cell holds K and V; its orange level is the share of gradient terms received, and
        a filled orange cell with a dot has them all. An outline is a page not held.
    """
    per_chunk = chunk_size // states[0].page_table.page_size
    num_chunks = states[0].num_chunks
    pages = (num_chunks - 1) * per_chunk  # the last chunk needs no pages: nothing reads them
    with style():
        figure = new_figure(7.2, 0.27 * len(states) + 1.25)
        ax = figure.subplots()
        for line, state in enumerate(states):
            for page in range(pages):
                chunk = page // per_chunk
                x = page + 0.6 * chunk
                due = num_chunks - 1 - chunk
                held = state.page_table.slots[row, page] >= 0
                _page(ax, x, line, held, state.page_table.terms[row, page] / due)
        names = [f"{s.phase} {s.chunk}" for s in states]
        ax.set_yticks(np.arange(len(states)) + 0.5, names)
        for label, state in zip(ax.get_yticklabels(), states, strict=True):
            label.set_color(COLOURS[state.phase])
        middles = [(c * (per_chunk + 0.6)) + per_chunk / 2 for c in range(num_chunks - 1)]
        ax.set_xticks(middles, [f"chunk {c}" for c in range(num_chunks - 1)])
        ax.xaxis.tick_top()
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_xlim(-0.2, pages + 0.6 * (num_chunks - 2) + 0.2)
        ax.set_ylim(len(states) + 0.1, -0.1)
        ax.set_title(
            "blue: K, V held    orange: gradient terms received    dot: all received", loc="left"
        )
    done = [
        f"chunk {c} after {s.phase} {s.chunk}"
        for c in range(num_chunks - 1)
        for s in states
        if s.page_table.terms[row, c * per_chunk] == num_chunks - 1 - c
    ]
    return Picture(
        figure,
        f"Pages of {num_chunks} chunks after each of {len(states)} stages. Pages hold all "
        "their gradient terms: " + "; ".join(done) + ".",
    )


def page_table(state: _ChunkState) -> Picture:
    """Draw where each logical page lies in the pool: a line from page to slot.

    Args:
        state: What `Engine.iter_step` yielded. Each sequence of the batch has its own pages;
            all share one pool.

    Returns:
        The pages of each sequence above, the pool's slots below, and a line for each entry.
    """
    slots = state.page_table.slots
    used = [[p for p in range(slots.shape[1]) if slots[r, p] >= 0] for r in range(len(slots))]
    total = max(int(slots.max()) + 1, sum(map(len, used)), 1)
    with style():
        figure = new_figure(7.2, 2.7)
        ax = figure.subplots()
        x = 0.0
        for row, pages in enumerate(used):
            colour = COLOURS[("kv_pages", "ordinary", "activations", "sweep")[row % 4]]
            start = x
            for page in pages:
                slot = int(slots[row, page])
                ax.add_patch(_box(x, 0, colour))
                ax.add_patch(_box(slot + 0.5 * (len(used) - 1), 3, colour))
                middle = slot + 0.5 * (len(used) - 1) + 0.5
                ax.plot([x + 0.5, middle], [1, 3], color=colour, lw=1.2, alpha=0.7)
                ax.text(x + 0.5, 0.5, page, ha="center", va="center", color="white", size=8)
                ax.text(middle, 3.5, slot, ha="center", va="center", color="white", size=8)
                x += 1
            if pages:
                ax.text((start + x) / 2, -0.25, f"sequence {row}: its pages in order", ha="center",
                        va="bottom", color=colour)  # fmt: skip
            x += 1
        ax.text((total + len(used) - 1) / 2, 4.2, "slots of the pool", ha="center", va="top")
        ax.set_xlim(-0.3, max(x - 1, total + 0.5 * (len(used) - 1)) + 0.3)
        ax.set_ylim(4.9, -1.0)
        ax.axis("off")
    where = "; ".join(
        f"sequence {r}: pages {pages} in slots {[int(slots[r, p]) for p in pages]}"
        for r, pages in enumerate(used)
    )
    return Picture(figure, f"Page table. {where}.")


def _page(ax: Axes, x: float, y: float, held: bool, received: float) -> None:
    if not held:
        ax.add_patch(_box(x, y, COLOURS["grid"], filled=False))
        return
    ax.add_patch(_box(x, y, COLOURS["kv_pages"]))
    if received > 0:
        height = 0.8 * min(received, 1.0)
        ax.add_patch(
            Rectangle((x + 0.1, y + 0.9 - height), 0.8, height, facecolor=COLOURS["page_gradients"])
        )
    if received >= 1:
        ax.plot(x + 0.5, y + 0.5, "o", color="white", ms=3)


def _box(x: float, y: float, colour: str, filled: bool = True) -> Rectangle:
    face = colour if filled else "none"
    return Rectangle((x + 0.1, y + 0.1), 0.8, 0.8, facecolor=face, edgecolor=colour, lw=1)
