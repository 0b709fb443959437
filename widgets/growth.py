"""Memory against context: one line for each way of training."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import FuncFormatter

from oomb_widgets.picture import COLOURS, LABELS, Picture, count, new_figure, size, style

Line = Sequence[tuple[float, float]]  # (context in tokens, bytes)


def memory_growth(
    lines: Mapping[str, Line],
    *,
    limit: float | None = None,
    limit_name: str = "the card",
    guess: float | None = None,
    log: bool = False,
    title: str = "",
) -> Picture:
    """Draw bytes against context.

    Args:
        lines: Points (tokens, bytes) for each way. The keys of encoding.json ("ordinary",
            "activations", "kv_pages", "page_gradients") get their own colour and name; any
            other key is drawn in the text colour under its own name.
        limit: Bytes that may not be passed, drawn as a dashed level.
        limit_name: What the limit belongs to.
        guess: A context in tokens the reader guessed, drawn as a vertical line.
        log: Draw both axes logarithmically, for ranges over more than a factor of a hundred.
        title: Text above the picture.

    Returns:
        A line for each way, named at its end.
    """
    with style():
        figure = new_figure(7.2, 3.6)
        ax = figure.subplots()
        for name, points in lines.items():
            colour = COLOURS.get(name, COLOURS["text"])
            tokens, nbytes = zip(*points, strict=True)
            dense = len(points) > 20
            ax.plot(tokens, nbytes, color=colour, lw=2.4, marker=None if dense else "o", ms=5)
            ax.annotate(
                f" {LABELS.get(name, name)}",
                (tokens[-1], nbytes[-1]),
                (6, 0),
                textcoords="offset points",
                color=colour,
                va="center",
                annotation_clip=False,
            )
        if log:
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
        else:
            ax.set_ylim(0)
        if limit is not None:
            ax.axhline(limit, color=COLOURS["limit"], ls=(0, (5, 3)), lw=1.4)
            ax.text(1.01, limit, f"{limit_name}: {size(limit)}", va="center",
                    transform=ax.get_yaxis_transform())  # fmt: skip
        if guess is not None:
            ax.axvline(guess, color=COLOURS["guess"], lw=1.8)
            ax.text(guess, 1.0, f"your guess: {count(guess)}", color=COLOURS["guess"], ha="center",
                    va="bottom", transform=ax.get_xaxis_transform())  # fmt: skip
        ax.set_xticks(_ticks(lines), [count(t) for t in _ticks(lines)])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: size(y)))
        ax.grid(axis="y", color=COLOURS["grid"], lw=0.8)
        ax.set_xlabel("context (tokens)")
        ax.set_title(title, loc="left")
    parts = [f"{LABELS.get(k, k)}, {size(p[0][1])} to {size(p[-1][1])}" for k, p in lines.items()]
    first, last = (next(iter(lines.values()))[i][0] for i in (0, -1))
    return Picture(
        figure, f"Memory from {count(first)} to {count(last)} tokens: " + "; ".join(parts) + "."
    )


def _ticks(lines: Mapping[str, Line]) -> list[float]:
    """Up to seven of the contexts that were measured, always with the last."""
    tokens = sorted({t for points in lines.values() for t, _ in points})
    step = -(-len(tokens) // 7)
    return tokens[::-1][::step][::-1]
