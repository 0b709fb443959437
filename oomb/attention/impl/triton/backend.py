"""The `triton` backend: one launch over all of a row's history, one over the own chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from oomb.attention.api import LayerCall
from oomb.attention.impl.triton.backward import (
    delta_kernel,
    key_grads_kernel,
    query_grads_kernel,
)
from oomb.attention.impl.triton.configs import (
    Tile,
    has_copy_engine,
    launch_first_that_fits,
    tiles,
)
from oomb.attention.impl.triton.forward import attend_kernel
from oomb.attention.sink import first_lse
from oomb.chunking import Chunk, Read

Accumulate = Literal["owner", "atomic"]
DELTA_ROWS = 64
SMALLEST_DESCRIBED = 32
"""A page needs this many tokens in a power of two before tiles are cut to fit inside it."""


@dataclass(frozen=True)
class Part:
    """Keys that one launch attends to.

    Attributes:
        k, v: [B, G, rows, dim]; B is 1 where they lie in pages.
        grad_k, grad_v: their gradients so far, same layout; None in a forward.
        page_rows: int32 [pages], the row of each page's first key; None where key j is row j.
        page: tokens per page, 0 without pages.
        keys: number of keys.
        offset: position of the first query minus position of the first key.
        causal: a query sees no key behind its own position.
        window: a query sees only keys less than this many positions back; None sees all.
        lowest: int32 [B, N], the first key that each query may see; None where it is 0.
        beyond: int32 [B, keys], the first query that each key's document does not hold.
        copies: whether the GPU has a copy engine that fetches a tile of a page by its descriptor.
    """

    k: torch.Tensor
    v: torch.Tensor
    keys: int
    grad_k: torch.Tensor | None = None
    grad_v: torch.Tensor | None = None
    page_rows: torch.Tensor | None = None
    page: int = 0
    offset: int = 0
    causal: bool = False
    window: int | None = None
    lowest: torch.Tensor | None = None
    beyond: torch.Tensor | None = None
    copies: bool = True

    @property
    def width(self) -> int:
        """Head dim, padded to what the matrix units take."""
        return max(16, triton.next_power_of_2(self.k.shape[3]))

    def fit(self, tile: Tile) -> tuple[int, bool]:
        """Keys per tile, and whether it is loaded row by row."""
        if not self.copies:  # a descriptor would become an address per number
            return tile.keys, True
        if not self.page:
            return tile.keys, False
        inside = self.page & -self.page  # the largest power of two that divides a page
        if inside >= min(tile.keys, SMALLEST_DESCRIBED):
            return min(tile.keys, inside), False
        return tile.keys, True

    def flags(self, keys: int, gather: bool) -> dict[str, object]:
        """What is compiled into a kernel for this part."""
        return {
            "D": self.width,
            "DIM": self.k.shape[3],
            "PAGE": self.page,
            "BN": keys,
            "GATHER": gather,
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "DOCUMENTS": self.lowest is not None,
            "PRECISION": "tf32x3" if self.k.dtype == torch.float32 else "ieee",
        }

    def key(self, kernel: str) -> tuple:
        """What the choice of a tile depends on."""
        return (
            kernel, self.k.device, self.k.dtype, self.k.shape[3], self.page, self.causal,
            self.window is None, self.lowest is None,
        )  # fmt: skip

    def cut(self, kernel: str) -> bool:
        """Whether a mask cuts many of the tiles that a kernel walks over."""
        masked = self.window is not None or self.lowest is not None
        return masked or (self.causal and kernel == "key_grads")

    def candidates(self, kernel: str) -> list[Tile]:
        """Tiles to try for a kernel."""
        capability = _capability(self.k.device)
        cut = self.cut(kernel)
        return self.by_fit(tiles(kernel, capability, self.k.dtype, self.width, cut=cut))

    def by_fit(self, found: list[Tile]) -> list[Tile]:
        """The same tiles; those that would shrink to lie inside a page go last."""
        return sorted(found, key=lambda tile: self.fit(tile)[0] < tile.keys)


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
            copies=_copies(k),
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
        offset=keys, window=call.window, copies=_copies(pages.k),
    )  # fmt: skip
    yield read, part


def _in_segments(call: LayerCall, read: Read, *, gradients: bool) -> Iterator[tuple[Read, Part]]:
    """The same where only one segment at a time is on the GPU."""
    for segment in call.history.seen(call.layer, read, call.window, gradients=gradients):
        part = Part(
            segment.k, segment.v, segment.k.shape[2], segment.grad_k, segment.grad_v,
            offset=read.last - segment.first, window=call.window,
            copies=_copies(segment.k),
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
            q, *_sources(part.k, part.v, keys, part.width, described=not gather),
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
            *_sources(q, grad_out, tile.queries, part.width, described=part.copies),
            *_sources(part.k, part.v, keys, part.width, described=not gather),
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
            q, grad_out, *_sources(part.k, part.v, keys, part.width, described=not gather),
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


def _sources(x: torch.Tensor, y: torch.Tensor, rows: int, width: int, *, described: bool) -> tuple:
    """Two tensors as a kernel takes them: two descriptors of tiles [rows, width], or pointers."""
    if not described:
        return None, None, x, y
    block = [1, 1, rows, width]
    return _descriptor(x, block), _descriptor(y, block), None, None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _copies(x: torch.Tensor) -> bool:
    return has_copy_engine(_capability(x.device))


def _descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    # A dimension of size 1 may have any stride, which a descriptor would not take.
    strides = [s if n > 1 else x.shape[3] for s, n in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block)


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
