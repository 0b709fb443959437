"""What the kernels share: finding a tile's rows, loading it, and which keys a query sees.

A part's keys are numbered 0 to S - 1. They lie in `rows` of a buffer: key j of a live tensor in row
j, key j of pages in row `page_rows[j // PAGE] + j % PAGE`. K, V and their gradients share row
numbers, so one lookup serves all four.

Two ways to load a tile: by a descriptor, which the copy engine of Hopper and later GPUs takes,
where it lies inside one page; and row by row (GATHER) where pages are smaller than tiles, or where
there is no such engine.

Query i sees key j if LOWEST[i] <= j (DOCUMENTS), j <= i + offset (CAUSAL) and
j > i + offset - window (WINDOW).
"""

import triton
import triton.language as tl


@triton.jit
def tile_rows(page_rows, start, S, PAGE: tl.constexpr, BN: tl.constexpr, GATHER: tl.constexpr):
    """Row of a tile's first key, or with GATHER the int64 row of each; PAGE 0 is no page table.

    Look a tile up one step before it is loaded: the lookup then waits for nobody. Behind the last
    key it returns some row that exists.
    """
    if PAGE == 0 and GATHER:
        return tl.minimum(start + tl.arange(0, BN), S - 1).to(tl.int64)
    elif PAGE == 0:
        return start
    elif GATHER:
        keys = tl.minimum(start + tl.arange(0, BN), S - 1)
        return tl.load(page_rows + keys // PAGE).to(tl.int64) + keys % PAGE
    else:
        first = tl.minimum(start, S - 1)
        return tl.load(page_rows + first // PAGE) + first % PAGE


@triton.jit
def load_tile(
    desc, ptr, stride_head, stride_row, b, head, rows,
    BN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """A tile [BN, D]; numbers behind DIM, the head dim proper, are 0."""
    if GATHER:
        dims = tl.arange(0, D)
        at = ptr + head.to(tl.int64) * stride_head + rows[:, None] * stride_row + dims[None, :]
        return tl.load(at, mask=dims[None, :] < DIM, other=0.0)
    else:
        return desc.load([b, head, rows, 0]).reshape(BN, D)


@triton.jit
def grad_rows(rows, BN: tl.constexpr, GATHER: tl.constexpr):
    """int64 row of each key of a tile."""
    if GATHER:
        return rows
    else:
        return rows.to(tl.int64) + tl.arange(0, BN)


@triton.jit
def visible(
    i, j, lowest, offset, window, S,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Whether query i sees key j; i, j and lowest broadcast."""
    seen = j < S
    if CAUSAL:
        seen = seen & (j <= i + offset)
    if WINDOW:
        seen = seen & (j > i + (offset - window))
    if DOCUMENTS:
        seen = seen & (j >= lowest)
    return seen


@triton.jit
def key_range(
    lowest_ptr, b, first, last, offset, window, N, S,
    BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Keys that queries first to last see, as tile-aligned cuts.

    Tiles in [begin, inner) and [outer, end) need the mask, those in [inner, outer) do not.
    """
    begin = 0
    inner = 0
    if DOCUMENTS:  # starts of documents never fall, so the block's ends have the extremes
        begin = tl.load(lowest_ptr + b * N + first)
        inner = tl.load(lowest_ptr + b * N + last)
    if WINDOW:
        begin = tl.maximum(begin, first + offset - window + 1)
        inner = tl.maximum(inner, last + offset - window + 1)
    end = S
    outer = S
    if CAUSAL:
        end = tl.minimum(end, last + offset + 1)
        outer = tl.minimum(outer, first + offset + 1)
    begin = begin // BN * BN
    inner = tl.minimum((inner + BN - 1) // BN * BN, (end + BN - 1) // BN * BN)
    inner = tl.maximum(inner, begin)
    outer = tl.maximum(outer // BN * BN, inner)
    return begin, inner, outer, end
