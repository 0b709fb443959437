"""The `triton` backend: one launch over all of a row's history, one over the own chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import triton

from oomb.attention.api import LayerCall
from oomb.attention.impl.triton.backward import (
    delta_kernel,
    key_grads_kernel,
    query_grads_kernel,
)
from oomb.attention.impl.triton.configs import Tile, launch_first_that_fits
from oomb.attention.impl.triton.forward import attend_kernel
from oomb.attention.impl.triton.part import Part, has_copies, sources
from oomb.attention.sink import first_lse
from oomb.chunking import Chunk, Read

Accumulate = Literal["owner", "atomic"]
DELTA_ROWS = 64


class TritonBackend:
    """Attention over pages anywhere in the pool, with masks of any kind.

    Args:
        accumulate: `owner` gives each tile of keys to one program, whose sum has one order;
            `atomic` scatters with atomic additions, whose order differs from run to run.
        by_segment: attend to history a segment at a time even where all of its pages are on the
            GPU: results then have the same bits wherever pages live.
    """

    name = "triton"

    def __init__(self, accumulate: Accumulate = "owner", *, by_segment: bool = False) -> None:
        self._atomic = accumulate == "atomic"
        self._by_segment = by_segment
        self._edges: tuple[Chunk | None, int, tuple] = (None, 0, (None, None))

    def attend(
        self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `oomb.attention.attend`."""
        rows, heads, tokens, dim = q.shape
        out = q.new_empty(rows, tokens, heads, dim)
        lse, state, sinks = first_lse(call.sink, q), None, call.sink is not None
        if sinks:
            state = torch.zeros_like(out, dtype=torch.float32)
        elif call.chunk.reads:  # not read where lse is -inf
            state = torch.empty_like(out, dtype=torch.float32)
        q, begun = _aligned(q), None
        for read, part in self._parts(call, gradients=False):
            at = slice(read.start, read.stop)
            row = slice(read.row, read.row + 1)
            here = state[row, at]
            before = here if sinks or read is begun else None
            forward(part, q[row, :, at], call.scale, here, lse[row, :, at], before)
            begun = read
        forward(self._own(call, k, v), q, call.scale, out, lse, state)
        return out, lse

    def attend_backward(
        self,
        call: LayerCall,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `oomb.attention.attend_backward`."""
        delta = row_dots(out, grad_out)
        q, grad_out = _aligned(q), _aligned(grad_out.transpose(1, 2))
        grad_k, grad_v = call.own_page_gradients(k, v)
        own = self._own(call, k, v, grad_k, grad_v)
        grad_q = torch.empty_like(q)
        state = torch.zeros_like(q, dtype=torch.float32) if call.chunk.reads else None
        begun = None
        for read, part in self._parts(call, gradients=True):
            at, row = slice(read.start, read.stop), slice(read.row, read.row + 1)
            *here, so_far = (x[row, :, at] for x in (q, grad_out, lse, delta, state))
            before = so_far if read is begun else None
            backward(part, *here, call.scale, so_far, before, atomic=self._atomic)
            begun = read
        backward(own, q, grad_out, lse, delta, call.scale, grad_q, state)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _own(
        self,
        call: LayerCall,
        k: torch.Tensor,
        v: torch.Tensor,
        grad_k: torch.Tensor | None = None,
        grad_v: torch.Tensor | None = None,
    ) -> Part:
        chunk, rows = call.chunk, k.shape[0]
        if self._edges[0] is not chunk or self._edges[1] != rows:
            self._edges = (chunk, rows, _document_edges(chunk, rows, k.device))
        lowest, beyond = self._edges[2]
        return Part(
            _aligned(k), _aligned(v), k.shape[2], grad_k, grad_v,
            causal=True, window=call.window, lowest=lowest, beyond=beyond,
            copies=has_copies(k),
        )  # fmt: skip

    def _parts(self, call: LayerCall, *, gradients: bool) -> Iterator[tuple[Read, Part]]:
        """(read, part) for each row whose queries see any of its history."""
        for read in call.chunk.reads:
            if call.history.resident and not self._by_segment:
                yield from _in_pages(call, read)
            else:
                yield from _in_segments(call, read, gradients=gradients)


def _in_pages(call: LayerCall, read: Read) -> Iterator[tuple[Read, Part]]:
    """All that a read sees, in one part."""
    first = read.first
    if call.window is not None:  # pages that the first query has left behind are not read
        first = max(first, read.last - call.window + 1)
        first -= (first - read.first) % call.history.table.page_size
    if first >= read.last:
        return
    pages = call.history.pages(call.layer, read.row, first, read.last)
    keys = read.last - first
    part = Part(
        pages.k, pages.v, keys, pages.grad_k, pages.grad_v, pages.rows, pages.page_size,
        offset=keys, window=call.window, copies=has_copies(pages.k),
    )  # fmt: skip
    yield read, part


def _in_segments(call: LayerCall, read: Read, *, gradients: bool) -> Iterator[tuple[Read, Part]]:
    """The same where only one segment at a time is on the GPU."""
    for segment in call.history.seen(call.layer, read, call.window, gradients=gradients):
        part = Part(
            segment.k, segment.v, segment.k.shape[2], segment.grad_k, segment.grad_v,
            offset=read.last - segment.first, window=call.window,
            copies=has_copies(segment.k),
        )  # fmt: skip
        yield read, part


def forward(
    part: Part,
    q: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: torch.Tensor | None = None,
) -> None:
    """Attend to a part; writes out and lse.

    Args:
        part: the keys.
        q: [B, H, N, dim].
        scale: factor on q . k.
        out: [B, N, H, dim]; where `state` is given, over both.
        lse: fp32 [B, H, N]; holds that of the state before, that of both after.
        state: fp32 [B, N, H, dim], output over the parts before, or None.
    """
    rows, heads, tokens, _ = q.shape

    def launch(tile: Tile) -> None:
        keys, gather = part.fit(tile)
        grid = (triton.cdiv(tokens, tile.queries), heads, rows)
        attend_kernel[grid](
            q, *sources(part.k, part.v, keys, part.width, described=not gather),
            part.page_rows, part.lowest, state, lse, out, lse,
            *q.stride()[:3], *part.k.stride()[:3],
            *(state.stride()[:2] if state is not None else (0, 0)), *out.stride()[:2],
            *lse.stride()[:2],
            tokens, part.keys, scale, part.offset, part.window or 0,
            GROUP=heads // part.k.shape[1], BM=tile.queries, HAS_STATE=state is not None,
            num_warps=tile.warps, num_stages=tile.stages, **part.flags(keys, gather),
        )  # fmt: skip

    launch_first_that_fits(part.key("attend"), part.candidates("attend"), launch)


def backward(
    part: Part,
    q: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    grad_q: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    atomic: bool = False,
) -> None:
    """Gradients of a part: writes grad_q and adds to the part's own.

    Args:
        part: the keys and their gradients.
        q: [B, H, N, dim].
        grad_out: [B, H, N, dim].
        lse: fp32 [B, H, N], over all parts.
        delta: fp32 [B, H, N], out . grad_out.
        scale: factor on q . k.
        grad_q: [B, H, N, dim]; where `state` is given, over both.
        state: fp32 [B, H, N, dim], gradient over the parts before, or None.
        atomic: add to the key gradients with atomic additions.
    """
    rows, heads, tokens, _ = q.shape
    group = heads // part.k.shape[1]

    def key_grads(tile: Tile) -> None:
        keys, gather = part.fit(tile)
        key_grads_kernel[(triton.cdiv(part.keys, keys), part.k.shape[1], rows)](
            *sources(q, grad_out, tile.queries, part.width, described=part.copies),
            *sources(part.k, part.v, keys, part.width, described=not gather),
            part.page_rows, part.lowest, part.beyond, lse, delta, part.grad_k, part.grad_v,
            *q.stride()[:3], *grad_out.stride()[:3], *part.k.stride()[:3],
            *part.grad_k.stride()[:3], *lse.stride()[:2],
            tokens, part.keys, scale, part.offset, part.window or 0,
            GROUP=group, BM=tile.queries, COPIES=part.copies,
            num_warps=tile.warps, num_stages=tile.stages, **part.flags(keys, gather),
        )  # fmt: skip

    def query_grads(tile: Tile) -> None:
        keys, gather = part.fit(tile)
        query_grads_kernel[(triton.cdiv(tokens, tile.queries), heads, rows)](
            q, grad_out, *sources(part.k, part.v, keys, part.width, described=not gather),
            part.page_rows, part.lowest, lse, delta, state, grad_q, part.grad_k, part.grad_v,
            *q.stride()[:3], *grad_out.stride()[:3], *part.k.stride()[:3],
            *part.grad_k.stride()[1:3],
            *_bhn(state), *_bhn(grad_q), *lse.stride()[:2],
            tokens, part.keys, scale, part.offset, part.window or 0,
            GROUP=group, BM=tile.queries, HAS_STATE=state is not None, ATOMIC=atomic,
            num_warps=tile.warps, num_stages=tile.stages, **part.flags(keys, gather),
        )  # fmt: skip

    if not atomic:
        launch_first_that_fits(part.key("key_grads"), part.candidates("key_grads"), key_grads)
    key = (*part.key("query_grads"), atomic)
    launch_first_that_fits(key, part.candidates("query_grads"), query_grads)


def row_dots(out: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """out . grad_out of each query: [B, N, H, dim] twice -> fp32 [B, H, N]."""
    rows, tokens, heads, dim = out.shape
    out, grad_out = (x if x.stride(3) == 1 else x.contiguous() for x in (out, grad_out))
    delta = out.new_empty(rows, heads, tokens, dtype=torch.float32)
    delta_kernel[(triton.cdiv(tokens, DELTA_ROWS), heads, rows)](
        out, grad_out, delta, *out.stride()[:3], *grad_out.stride()[:3], tokens,
        H=heads, BM=DELTA_ROWS, D=triton.next_power_of_2(dim), DIM=dim,
    )  # fmt: skip
    return delta


def _bhn(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides of [B, H, N, dim] in the order of rows, tokens, heads."""
    return (x.stride(0), x.stride(2), x.stride(1)) if x is not None else (0, 0, 0)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows begin at multiples of 16 bytes, as the copy engine wants them."""
    strides = [s for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    aligned = all(s * x.itemsize % 16 == 0 for s in strides) and x.data_ptr() % 16 == 0
    return x if aligned and x.stride(-1) == 1 else x.contiguous()


def _document_edges(
    chunk: Chunk, rows: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Per token of the own chunk: where its document begins and ends; None where all hold one.

    Tokens behind a row's end begin behind everything, so that they see no key.
    """
    tokens = chunk.stop - chunk.start
    whole = len(chunk.own) == 1 and chunk.own[0].rows == (0, rows)
    if whole and (chunk.own[0].start, chunk.own[0].stop) == (0, tokens):
        return None, None
    edges = torch.full((2, rows, tokens), tokens, dtype=torch.int32, device="cpu")
    for own in chunk.own:
        edges[0, slice(*own.rows), own.start : own.stop] = own.start
        edges[1, slice(*own.rows), own.start : own.stop] = own.stop
    if device.type == "cuda":
        edges = edges.pin_memory().to(device, non_blocking=True)
    return edges[0], edges[1]
