"""A static picture that any notebook viewer can show: a PNG and one sentence."""

import io
import json
from collections.abc import Generator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

# One file for these pictures and for the timeline in the browser.
_ENCODING = json.loads(resources.files("oomb").joinpath("profiling/web/encoding.json").read_text())
COLOURS: dict[str, str] = _ENCODING["colours"]
LABELS: dict[str, str] = _ENCODING["labels"]

_POINTS_PER_INCH = 100  # CSS pixels an inch takes in the notebook
_SHARPNESS = 2  # image pixels per CSS pixel, so that text stays crisp on dense screens

# Text and lines are a mid-tone on a transparent ground: one image reads on white and on black.
_STYLE = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": COLOURS["text"],
    "axes.edgecolor": COLOURS["text"],
    "axes.labelcolor": COLOURS["text"],
    "axes.titlecolor": COLOURS["text"],
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": COLOURS["text"],
    "ytick.color": COLOURS["text"],
    "legend.frameon": False,
    "legend.labelcolor": COLOURS["text"],
    "hatch.linewidth": 1.2,
}


class Picture:
    """A finished picture. As the last line of a cell it shows itself.

    Args:
        figure: What to draw; it is rendered at once.
        alt: One sentence that says what it shows.

    Attributes:
        png: The image file, RGBA on a transparent ground.
        alt: One sentence that says what the picture shows, for readers who cannot see it.
        width: Width in CSS pixels.
        height: Height in CSS pixels.
    """

    def __init__(self, figure: Figure, alt: str) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=_POINTS_PER_INCH * _SHARPNESS, transparent=True)
        self.png = _shrink(buffer.getvalue())
        self.alt = alt
        self.width, self.height = (round(s * _POINTS_PER_INCH) for s in figure.get_size_inches())

    def save(self, path: str | Path) -> Path:
        """Write the PNG to `path` and return it."""
        path = Path(path)
        path.write_bytes(self.png)
        return path

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        data = {"image/png": self.png, "text/plain": self.alt}
        return data, {"image/png": {"width": self.width, "height": self.height}}


@contextmanager
def style() -> Generator[None, None, None]:
    """Make every figure drawn inside use the pictures' fonts and colours."""
    with mpl.rc_context(_STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches, tied to no window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def size(nbytes: float) -> str:
    """Write a number of bytes the way people say it: 512 B, 1.5 MB, 140 GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def count(tokens: float) -> str:
    """Write a number of tokens: 512, 16K, 1M (K and M in steps of 1,024, as contexts are named)."""
    for unit in ("", "K", "M"):
        if abs(tokens) < 1024 or unit == "M":
            return f"{tokens:.3g}{unit}"
        tokens /= 1024
    raise AssertionError("unreachable")


def _shrink(png: bytes) -> bytes:
    """Store the image with 255 colours instead of millions: a quarter of the bytes."""
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    small = io.BytesIO()
    image.quantize(255, method=Image.Quantize.FASTOCTREE).save(small, "png", optimize=True)
    return small.getvalue()
