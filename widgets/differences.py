"""How far gradients are from the true ones: one dot for each parameter."""

from collections.abc import Mapping

import numpy as np

from oomb_widgets.picture import COLOURS, Picture, new_figure, style

_FLOOR = 1e-18  # where an exact zero is drawn on the logarithmic axis


def gradient_differences(
    ways: Mapping[str, Mapping[str, float]],
    *,
    guess: float | None = None,
    rounding: float | None = None,
    title: str = "relative gradient difference, one dot per parameter",
) -> Picture:
    """Draw each parameter's relative gradient difference on a logarithmic axis.

    Args:
        ways: For each way of computing gradients, {parameter name: |g - truth| / |truth|}.
            Differences above 1e-3 are drawn in the colour of a wrong result.
        guess: The largest difference the reader guessed, drawn as a vertical line.
        rounding: The number format's own rounding, torch.finfo(dtype).eps, drawn dashed.
        title: Text above the picture.

    Returns:
        A row of dots for each way; an exact zero is drawn at the left end.
    """
    with style():
        figure = new_figure(7.2, 0.75 * len(ways) + 1.3)
        ax = figure.subplots()
        for row, differences in enumerate(ways.values()):
            values = np.maximum(np.array(list(differences.values())), _FLOOR)
            colours = [COLOURS["right" if v <= 1e-3 else "wrong"] for v in values]
            spread = 0.25 * np.sin(2.4 * np.arange(len(values)))  # so that equal dots stay apart
            ax.scatter(values, row + spread, c=colours, s=34, alpha=0.75, linewidths=0)
            if len(values) <= 8:
                _names(ax, row, differences)
        lines = (("guess", guess, "your guess"), ("limit", rounding, "rounding of the format"))
        for colour, value, text in lines:
            if value is not None:
                dash = "-" if colour == "guess" else (0, (5, 3))
                ax.axvline(value, color=COLOURS[colour], lw=1.6, ls=dash)
                ax.text(value, 1.0, text, color=COLOURS[colour], ha="center", va="bottom", size=9,
                        transform=ax.get_xaxis_transform())  # fmt: skip
        ax.set_xscale("log")
        ax.set_xlim(_FLOOR / 3, 10)
        exponents = range(-15, 1, 3)
        ticks = [10.0**e for e in exponents]
        ax.set_xticks([_FLOOR, *ticks], ["0", *(f"$10^{{{e}}}$" for e in exponents)])
        ax.set_yticks(range(len(ways)), list(ways))
        ax.set_ylim(len(ways) - 0.45, -0.55)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color=COLOURS["grid"], lw=0.8)
        ax.set_title(title, loc="left", pad=18 if guess or rounding else 6)
    parts = [
        f"{way}: largest {np.max(list(d.values())):.1e} over {len(d)} parameters"
        for way, d in ways.items()
    ]
    return Picture(figure, "Relative gradient differences. " + "; ".join(parts) + ".")


def _names(ax, row: int, differences: Mapping[str, float]) -> None:
    """Name the wrong parameters, and the right ones together: few enough to be read."""
    wrong = {name: v for name, v in differences.items() if not v <= 1e-3}
    if wrong:
        ax.text(3e-3 / 8, row, ", ".join(wrong), color=COLOURS["wrong"], ha="right", va="center",
                size=9)  # fmt: skip
    right = [name for name in differences if name not in wrong]
    if right:
        ax.text(3e-14, row, ", ".join(right), color=COLOURS["right"], va="center", size=9)
