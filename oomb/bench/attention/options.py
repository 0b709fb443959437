"""What `oomb bench attention` is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from oomb.attention.choose import BACKENDS
from oomb.bench.inputs import (
    DTYPES,
    InputError,
    check_device,
    check_least,
    check_multiple,
    check_out,
    choose,
    numbers,
    words,
)
from oomb.segments import MAX_SEGMENT_TOKENS

RECTANGLES = {"cuda": (4096, "8192,32768,131072"), "cpu": (128, "256,1024")}
SQUARES = {"cuda": "32768", "cpu": "256"}
ATOMIC = "triton-atomic"
"""The backend `triton` with accumulate='atomic'."""
NAMED_BACKENDS = (*(name for name in BACKENDS if name != "auto"), ATOMIC)
# The reference holds whole score matrices: on a GPU it is measured only if it is asked for.
OURS = {
    "cuda": [name for name in NAMED_BACKENDS if name != "reference"],
    "cpu": list(NAMED_BACKENDS),
}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The command line; sizes are in tokens, None is the device's default."""

    queries: int | None = None
    keys: str | None = None
    square: str | None = None
    heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    dtype: str = "bf16"
    page_grad_dtype: str = "fp32"
    page: int = 128
    segment: int | None = None
    backends: str | None = None
    peers: bool = True
    error: bool = True
    rounds: int = 5
    device: str = "auto"
    out: Path | None = None


@dataclass(frozen=True)
class Shape:
    """One attention call: a rectangle of queries over history, or a causal square.

    Attributes:
        queries, keys: tokens.
        causal: a square, in which a query sees itself and what precedes it.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: numbers per head.
    """

    queries: int
    keys: int
    causal: bool
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def forward_flops(self) -> float:
        """4 H N S D: q . k and weights . v, of two operations each; half of it under a diagonal."""
        full = 4 * self.heads * self.queries * self.keys * self.head_dim
        return full / 2 if self.causal else float(full)

    @property
    def backward_flops(self) -> float:
        """2.5 times the forward's: five products instead of two, the scores being made again."""
        return 2.5 * self.forward_flops

    def __str__(self) -> str:
        kind = "causal square" if self.causal else "queries over history"
        return f"{self.queries:,} x {self.keys:,}, {kind}"


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Options that were checked, with every default filled in.

    Attributes:
        segment: tokens per segment at most; None lets a segment be as long as the engine's.
    """

    shapes: list[Shape]
    device: torch.device
    dtype: torch.dtype
    page_grad_dtype: torch.dtype
    page: int
    segment: int | None
    backends: list[str]
    peers: bool
    error: bool
    rounds: int

    def segment_pages(self, keys: int) -> int:
        """Pages per segment of a history: no more than it needs."""
        tokens = min(self.segment or MAX_SEGMENT_TOKENS, keys)
        return max(1, -(-tokens // self.page))


def check(options: AttentionOptions) -> AttentionSettings:
    """Check `options` before any work.

    Args:
        options: the command line.

    Returns:
        What to measure.

    Raises:
        InputError: an option cannot be used.
    """
    device = check_device(options.device)
    check_out(options.out)
    queries, keys = RECTANGLES[device.type]
    queries = options.queries if options.queries is not None else queries
    for flag, value in (
        ("--queries", queries), ("--heads", options.heads), ("--kv-heads", options.kv_heads),
        ("--head-dim", options.head_dim), ("--page", options.page), ("--rounds", options.rounds),
    ):  # fmt: skip
        check_least(flag, value, 1)
    check_multiple("--heads", options.heads, "--kv-heads", options.kv_heads)
    if options.segment is not None:
        check_least("--segment", options.segment, 1)
        check_multiple("--segment", options.segment, "--page", options.page)
    heads = options.heads, options.kv_heads, options.head_dim
    shapes = [
        Shape(queries, number, False, *heads)
        for number in numbers("--keys", keys if options.keys is None else options.keys)
    ]
    square = SQUARES[device.type] if options.square is None else options.square
    shapes += [Shape(side, side, True, *heads) for side in numbers("--square", square)]
    if not shapes:
        raise InputError("--keys and --square are both none, so there is nothing to measure.")
    return AttentionSettings(
        shapes=shapes,
        device=device,
        dtype=DTYPES[choose("--dtype", options.dtype, DTYPES)],
        page_grad_dtype=DTYPES[choose("--page-grad-dtype", options.page_grad_dtype, DTYPES)],
        page=options.page,
        segment=options.segment,
        backends=(
            OURS[device.type]
            if options.backends is None
            else words("--backends", options.backends, NAMED_BACKENDS)
        ),
        peers=options.peers,
        error=options.error,
        rounds=options.rounds,
    )
