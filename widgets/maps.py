"""Chunk by chunk maps: who reads whose pages, and which gradient terms arrive in time."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Polygon

from oomb_widgets.picture import COLOURS, Picture, new_figure, style


def who_reads_whom(num_chunks: int, halted: tuple[str, int] | None = None) -> Picture:
    """Draw the fill and the sweep as two maps: row = chunk being computed, column = pages used.

    Args:
        num_chunks: Chunks in the sequence, at least 1.
        halted: Stop after this step, ("fill" or "sweep", chunk); later rows stay empty.
            None draws the finished step.

    Returns:
        In the fill a blue cell is "row reads column's K and V". In the sweep an orange cell is
        "row adds its term to column's page gradients". The diagonal is the chunk itself.
    """
    done_fill, done_sweep = num_chunks - 1, 0
    if halted is not None:
        phase, chunk = halted
        done_fill, done_sweep = (chunk, num_chunks) if phase == "fill" else (num_chunks - 1, chunk)
    with style():
        side = max(0.34 * num_chunks + 0.9, 2.6)
        figure = new_figure(2 * side + 1.2, side + 0.85)
        fill, sweep = figure.subplots(1, 2)
        _map(fill, num_chunks, "fill", lambda i, j: "fill" if i <= done_fill else "empty")
        _map(sweep, num_chunks, "sweep", lambda i, j: "sweep" if i >= done_sweep else "empty")
        fill.set_title("fill, top to bottom:\nrow reads K, V of column", loc="left")
        sweep.set_title("sweep, bottom to top:\nrow adds to column's gradient", loc="left")
        _order_arrow(fill, num_chunks, downwards=True, colour=COLOURS["fill"])
        _order_arrow(sweep, num_chunks, downwards=False, colour=COLOURS["sweep"])
    where = f", halted after {halted[0]} of chunk {halted[1]}" if halted else ""
    last = (
        "" if halted else " The last chunk, whose pages nobody reads, may read in the sweep only."
    )
    return Picture(
        figure,
        f"Two lower-triangular maps of {num_chunks} chunks{where}. Fill: chunk i reads the pages "
        "of every chunk before it. Sweep: chunk i adds a gradient term to each of those pages."
        f"{last}",
    )


def gradient_flow(
    order: Sequence[int], strength: np.ndarray | None = None, title: str | None = None
) -> Picture:
    """Draw which gradient terms reach their page before that page's own backward runs.

    Args:
        order: The chunks in the order their backward runs, each of 0..n-1 once.
        strength: [n, n], the size of chunk i's term in chunk j's page gradients; stronger cells
            are larger terms. None draws all terms alike.
        title: Text above the map; None counts the terms that arrived.

    Returns:
        A map with a filled cell (i, j) where chunk i ran before chunk j, and a crossed red cell
        where the term came too late.
    """
    n = len(order)
    turn = {chunk: position for position, chunk in enumerate(order)}
    if sorted(turn) != list(range(n)):
        raise ValueError(f"order must name each chunk 0..{n - 1} once, got {list(order)}")
    late = [(i, j) for i in range(n) for j in range(i) if turn[i] > turn[j]]
    due = n * (n - 1) // 2
    top = None if strength is None else max(float(np.tril(strength, -1).max()), 1e-300)

    with style():
        side = 0.5 * n + 0.9
        figure = new_figure(side + 2.2, side + 0.4)
        ax = figure.subplots()
        _map(
            ax,
            n,
            "sweep",
            lambda i, j: "late" if (i, j) in late else "sweep",
            None if top is None else lambda i, j: 0.12 + 0.88 * float(strength[i, j]) / top,
        )
        for chunk, position in turn.items():
            ax.text(n + 0.15, chunk + 0.5, f"runs {_ordinal(position + 1)}", va="center", size=9)
        ax.set_xlim(-0.1, n + 1.6)
        ax.set_title(title or f"{due - len(late)} of {due} terms arrive in time", loc="left")
    lost = ", ".join(f"{i} to {j}" for i, j in late) or "none"
    return Picture(
        figure,
        f"Map of gradient terms for backward order {list(order)}: {due - len(late)} of {due} "
        f"arrive in time; too late: {lost}.",
    )


def _map(
    ax: Axes,
    n: int,
    phase: str,
    state: Callable[[int, int], str],
    strength: Callable[[int, int], float] | None = None,
) -> None:
    """Draw an n x n lower triangle; `state(i, j)` is "fill", "sweep", "late" or "empty"."""
    for i in range(n):
        _own_chunk(ax, i, COLOURS[phase] if state(i, i) != "empty" else COLOURS["grid"])
        for j in range(i):
            look = state(i, j)
            if look == "late":
                _cell(ax, i, j, "none", COLOURS["wrong"])
                ax.plot(
                    [j + 0.3, j + 0.7, np.nan, j + 0.3, j + 0.7],
                    [i + 0.3, i + 0.7, np.nan, i + 0.7, i + 0.3],
                    color=COLOURS["wrong"],
                    lw=1.4,
                )
            elif look == "empty":
                _cell(ax, i, j, "none", COLOURS["grid"])
            else:
                _cell(ax, i, j, COLOURS[look], "none", strength(i, j) if strength else 0.9)
    ax.set_xlim(-0.1, n + 0.1)
    ax.set_ylim(n + 0.1, -0.1)
    ax.set_aspect("equal")
    ax.set_xticks(np.arange(n) + 0.5, range(n))
    ax.set_yticks(np.arange(n) + 0.5, range(n))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("pages of chunk")
    ax.set_ylabel("chunk being computed")


def _cell(ax: Axes, i: int, j: int, face: str, edge: str, alpha: float = 1.0) -> None:
    ax.add_patch(
        FancyBboxPatch(
            (j + 0.1, i + 0.1),
            0.8,
            0.8,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=face,
            edgecolor=edge,
            alpha=alpha if face != "none" else None,
            linewidth=1.2,
        )
    )


def _own_chunk(ax: Axes, i: int, colour: str) -> None:
    """The diagonal: a chunk sees itself causally, half a square."""
    corners = [(i + 0.1, i + 0.1), (i + 0.1, i + 0.9), (i + 0.9, i + 0.9)]
    ax.add_patch(Polygon(corners, facecolor=colour, edgecolor="none", alpha=0.55))


def _order_arrow(ax: Axes, n: int, downwards: bool, colour: str) -> None:
    start, end = (0.1, n - 0.1) if downwards else (n - 0.1, 0.1)
    ax.annotate(
        "",
        (n + 0.35, end),
        (n + 0.35, start),
        arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6, "mutation_scale": 14},
    )
    ax.set_xlim(-0.1, n + 0.6)


def _ordinal(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"
