"""What is alive in memory at one moment: bars in bytes."""

from collections.abc import Mapping

from oomb_widgets.picture import COLOURS, LABELS, Picture, new_figure, size, style


def alive(
    ways: Mapping[str, Mapping[str, float]], *, guess: float | None = None, title: str = ""
) -> Picture:
    """Draw one stacked bar for each way of training.

    Args:
        ways: For each way its parts in bytes, for instance
            {"OOMB": {"activations": 3e6, "kv_pages": 1e6}, "whole": {"ordinary": 9e7}}.
            Parts named in encoding.json keep their colour.
        guess: Bytes the reader guessed, drawn as a vertical line.
        title: Text above the bars.

    Returns:
        The bars, each with its total.
    """
    with style():
        figure = new_figure(7.2, 0.62 * len(ways) + 1.5)
        ax = figure.subplots()
        widest = max(sum(parts.values()) for parts in ways.values())
        named: dict[str, str] = {}
        for row, parts in enumerate(ways.values()):
            left = 0.0
            for part, nbytes in parts.items():
                colour = COLOURS.get(part, COLOURS["text"])
                ax.barh(row, nbytes, left=left, color=colour, height=0.6, alpha=0.9)
                named[LABELS.get(part, part)] = colour
                left += nbytes
            ax.text(left + 0.01 * widest, row, size(left), va="center")
        if guess is not None:
            ax.axvline(guess, color=COLOURS["guess"], lw=1.8)
            ax.text(guess, -0.62, " your guess", color=COLOURS["guess"], va="bottom")
        ax.set_xlim(0, 1.14 * max(widest, guess or 0))
        ax.set_yticks(range(len(ways)), list(ways))
        ax.invert_yaxis()
        ax.set_xticks([])
        ax.spines["bottom"].set_visible(False)
        ax.tick_params(length=0)
        ax.set_title(title, loc="left")
        handles = [ax.barh(0, 0, color=c) for c in named.values()]
        figure.legend(handles, list(named), loc="outside lower left", ncols=4, fontsize=9.5,
                      columnspacing=1.5, handlelength=1.3)  # fmt: skip
    parts = [
        f"{way}: " + " + ".join(f"{LABELS.get(p, p)} {size(b)}" for p, b in bars.items())
        for way, bars in ways.items()
    ]
    return Picture(figure, "Bytes alive. " + "; ".join(parts) + ".")
