"""The history: all that attention ever sees of the pages of earlier chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from oomb.cache import fp8
from oomb.cache.layout import SlotLayout, as_attended
from oomb.cache.pool import LayerShape, PagePool, gradient_layouts, key_layouts
from oomb.cache.stochastic import StochasticRounding
from oomb.cache.table import PageTable
from oomb.chunking import Chunk, Read
from oomb.profiling.live_bytes import category


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one row and layer.

    Attributes:
        first: logical token number of the first token.
        k, v: views [1, kv heads, tokens, dim].
        grad_k, grad_v: views of the page gradients, same shape; None before the sweep.
    """

    first: int
    k: torch.Tensor
    v: torch.Tensor
    grad_k: torch.Tensor | None
    grad_v: torch.Tensor | None


@dataclass(frozen=True)
class Pages:
    """Pages of one row and layer, wherever they lie in the pool.

    K, V and their gradients share row numbers.

    Attributes:
        k, v: views [1, kv heads, pool rows, dim].
        grad_k, grad_v: views of the page gradients, same shape; None before the sweep.
        rows: int32 [pages] on the device, the pool row of each page's first token.
        page_size: tokens per page.
    """

    k: torch.Tensor
    v: torch.Tensor
    grad_k: torch.Tensor | None
    grad_v: torch.Tensor | None
    rows: torch.Tensor
    page_size: int


@dataclass(frozen=True)
class Visit:
    """One attention call's use of the history.

    Attributes:
        layer: layer number.
        what: `keys` for a forward, `gradients` for a backward (it reads K and V too), `own` for
            what later chunks left in the chunk's own pages.
        window: the layer's sliding window in tokens, or None.
    """

    layer: int
    what: Literal["keys", "gradients", "own"]
    window: int | None = None


class History:
    """K/V pages and their gradients for one step.

    This one has all of them on one device; others give the same answers from elsewhere.

    Args:
        layers: what each layer stores.
        pages_per_row: pages of each row.
        page_size: tokens of a page.
        segment_pages: pages of a segment.
        page_grad_dtype: in which page gradients accumulate.
        device: of the model.
        gpu_slots: slots of the pool on the device; None has all there.
        page_dtype: "fp8", or None for K and V as the model makes them.
        rounding: rounds page gradients into their pages; None has kernels add there.

    Attributes:
        resident: whether every page is in the pool at any time, as it is attended to, so that
            `pages` can be asked for.
        table: which pages are held, and where.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        *,
        pages_per_row: list[int],
        page_size: int,
        segment_pages: int,
        page_grad_dtype: torch.dtype,
        device: torch.device,
        gpu_slots: int | None = None,
        page_dtype: str | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        self.resident = page_dtype is None and rounding is None
        self.table = PageTable(
            pages_per_row=pages_per_row,
            page_size=page_size,
            segment_pages=segment_pages,
            gpu_slots=gpu_slots,
        )
        self._layers = layers
        self._device = device
        self._grad_dtype = page_grad_dtype
        self._segment_tokens = segment_pages * page_size
        self._key_layouts = key_layouts(layers, self._segment_tokens, page_size, page_dtype)
        self._quantised, self._rounding = page_dtype is not None, rounding
        with category("kv_pages"):
            self._kv = self._pool(self._key_layouts)
            read = [shape.dtype for shape in layers]
            self._read_room = self._room(read) if self._quantised else None
        self._added_room: torch.Tensor | None = None
        self._grads: PagePool | None = None
        self._page_rows: tuple[int, torch.Tensor] | None = None  # table's version, on the device

    def _pool(self, layouts: list[SlotLayout], *, zero: bool = False) -> PagePool:
        slots = self.table.gpu_slots
        return PagePool(layouts, slots=slots, device=self._device, zero=zero)

    def _room(self, dtypes: list[torch.dtype]) -> torch.Tensor:
        """Memory for one segment of any layer: uint8 [bytes]."""
        size = segment_bytes(self._layers, dtypes, self._segment_tokens)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def open_gradients(self) -> None:
        """Make zeroed page gradients for everything held; called once, when the fill is over."""
        self._gradient_layouts = gradient_layouts(
            self._layers, self._segment_tokens, self.table.page_size, self._grad_dtype
        )
        with category("page_gradients"):
            self._grads = self._pool(self._gradient_layouts, zero=True)
            if self._rounding is not None:
                self._added_room = self._room([wide(shape.dtype) for shape in self._layers])

    def expect(self, chunk: Chunk, visits: Sequence[Visit]) -> None:
        """Say what a chunk will ask for, in order; only of use where pages have a way to go."""

    def close(self) -> None:
        """The step is over, or abandoned."""

    def write(self, layer: int, row: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, each [kv heads, tokens, dim], as tokens `first` and on; slots are held."""
        at = 0
        for index, start, stop in self.table.segments(first, first + k.shape[1]):
            here = slice(at, at + stop - start)
            self._write(layer, self.table.slot(row, index), start, k[:, here], v[:, here])
            at = here.stop

    def _write(self, layer: int, slot: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._put(layer, self._kv.slot(layer, slot), start, k, v)

    def _put(
        self, layer: int, slot: torch.Tensor, start: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store k and v in a slot's bytes, from its token `start` on."""
        layout = self._key_layouts[layer]
        numbers = layout.numbers(slot)
        if self._quantised:
            for own, *there in zip((k, v), numbers, layout.scales(slot), strict=True):
                fp8.write(*there, own, start, layout.page_size)
            return
        for own, there in zip((k, v), numbers, strict=True):
            there[start : start + own.shape[1]].copy_(own.transpose(0, 1))

    def as_stored(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """K or V [kv heads, tokens, dim] of tokens `first` and on, as pages give them back."""
        return fp8.rounded(x, first, self.table.page_size) if self._quantised else x

    def pieces(
        self, layer: int, row: int, first: int, last: int
    ) -> Iterator[tuple[slice, Segment]]:
        """`segments`, each behind the token range it covers, counted from `first`."""
        for segment in self.segments(layer, row, first, last):
            start = segment.first - first
            yield slice(start, start + segment.k.shape[2]), segment

    def segments(
        self, layer: int, row: int, first: int, last: int, *, gradients: bool = False
    ) -> Iterator[Segment]:
        """Tokens [first, last) of a row, a segment at a time, in order.

        Args:
            layer: layer number.
            row: batch row.
            first: logical token number.
            last: logical token number behind the last token.
            gradients: whether page gradients are wanted too; they grow in place.

        Returns:
            An iterator of segments, each there until the next is asked for.
        """
        size = self.table.page_size
        border = first % size or last % size
        return self._cut(layer, row, self.table.segments(first, last), gradients, border)

    def seen(
        self, layer: int, read: Read, window: int | None, *, gradients: bool = False
    ) -> Iterator[Segment]:
        """The same for a read, less the segments that a window hides from all its queries."""
        border = read.last % self.table.page_size  # the chunk before ended there
        return self._cut(layer, read.row, self.table.seen(read, window), gradients, border)

    def _cut(
        self,
        layer: int,
        row: int,
        pieces: list[tuple[int, int, int]],
        gradients: bool,
        border: int,
    ) -> Iterator[Segment]:
        for index, start, stop in pieces:
            slot, first = self.table.slot(row, index), index * self._segment_tokens + start
            with self._stored(layer, slot, start, stop, gradients) as (keys, grads):
                read = as_attended(self._read(layer, keys, start, stop, border))
                if grads is None:
                    yield Segment(first, *read, None, None)
                    continue
                with self._adding(layer, grads, start, stop) as added:
                    yield Segment(first, *read, *as_attended(added))

    @contextmanager
    def _stored(
        self, layer: int, slot: int, start: int, stop: int, gradients: bool
    ) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """The bytes of a slot's K and V and of their gradients, of which a range is wanted."""
        grads = self._grads.slot(layer, slot) if gradients else None
        yield self._kv.slot(layer, slot), grads

    def _read(
        self, layer: int, slot: torch.Tensor, start: int, stop: int, border: int
    ) -> torch.Tensor:
        """Tokens [start, stop) of a slot's bytes: [K|V, tokens, heads, dim]."""
        layout = self._key_layouts[layer]
        numbers = layout.numbers(slot)
        if not self._quantised:
            return numbers[:, start:stop]
        size = layout.page_size
        first, last = start // size, -(-stop // size)
        pages = numbers.unflatten(1, (-1, size))[:, first:last]
        out = _front(self._read_room, pages.shape, self._layers[layer].dtype)
        fp8.read(pages, layout.scales(slot)[:, first:last], border, out)
        return out.flatten(1, 2)[:, start - first * size : stop - first * size]

    @contextmanager
    def _adding(
        self, layer: int, slot: torch.Tensor, start: int, stop: int
    ) -> Iterator[torch.Tensor]:
        """Where kernels add to the gradients of tokens [start, stop): [K|V, tokens, heads, dim]."""
        stored = self._gradient_layouts[layer].numbers(slot)[:, start:stop]
        if self._rounding is None:
            yield stored
            return
        added = _front(self._added_room, stored.shape, wide(self._layers[layer].dtype))
        yield added.copy_(stored)
        self._rounding.store(added, stored)

    def own_gradients(
        self, layer: int, row: int, first: int, last: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """What later chunks left in the pages of tokens [first, last).

        Args:
            layer: layer number.
            row: batch row.
            first: logical token number.
            last: logical token number behind the last token.

        Yields:
            Token range counted from `first`, and gradients of its K and V, [kv heads, tokens, dim].
            Where nobody left anything, the range may be missing.
        """
        at = 0
        for index, start, stop in self.table.segments(first, last):
            slot, here = self.table.slot(row, index), slice(at, at + stop - start)
            at = here.stop
            for grad_k, grad_v in self._own_gradients(layer, slot, start, stop):
                yield here, grad_k[0], grad_v[0]

    def _own_gradients(
        self, layer: int, slot: int, start: int, stop: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield self._gradients_in(layer, self._grads.slot(layer, slot), start, stop)

    def _gradients_in(
        self, layer: int, slot: torch.Tensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens [start, stop) of a slot's bytes: K's and V's, [1, kv heads, tokens, dim]."""
        return as_attended(self._gradient_layouts[layer].numbers(slot)[:, start:stop])

    def pages(self, layer: int, row: int, first: int, last: int) -> Pages:
        """The pages of tokens [first, last) of a row; `first` is a page's first token."""
        size = self.table.page_size
        assert first % size == 0, f"token {first} does not begin a page of {size}"
        rows = self._rows_on_device()[row, first // size : -(-last // size)]
        grads = (None, None) if self._grads is None else self._grads.all_tokens(layer)
        return Pages(*self._kv.all_tokens(layer), *grads, rows, size)

    @contextmanager
    def gather(
        self, layer: int, read: Read, pages: torch.Tensor, *, gradients: bool = False
    ) -> Iterator[Segment]:
        """Chosen pages of a read, side by side in one segment that is there inside the block.

        Args:
            layer: layer number.
            read: the history they are chosen from.
            pages: int32 [kv heads or 1, K], complete pages counted from the read's first; no head
                has one twice.
            gradients: whether page gradients are wanted too; what they have become when the block
                ends is stored.

        Yields:
            The segment, of K pages for each head.
        """
        assert self.resident, "chosen pages are gathered from where they were written"
        found = self.pages(layer, read.row, read.first, read.last)
        tokens = torch.arange(found.page_size, device=self._device)
        rows = (found.rows[pages.long()].long()[..., None] + tokens).flatten(1)
        _, heads, _, dim = found.k.shape
        index = rows[None, :, :, None].expand(1, heads, -1, dim)
        there = (found.grad_k, found.grad_v) if gradients else ()
        grads = [each.gather(2, index) for each in there]
        k, v = (each.gather(2, index) for each in (found.k, found.v))
        yield Segment(read.first, k, v, *(grads or (None, None)))
        for each, grown in zip(there, grads, strict=True):
            each.scatter_(2, index, grown)

    def _rows_on_device(self) -> torch.Tensor:
        """int32 [rows, pages], copied again only after slots have changed hands."""
        version = self.table.version
        if self._page_rows is None or self._page_rows[0] != version:
            rows = torch.from_numpy(self.table.page_rows())
            if self._device.type == "cuda":
                rows = rows.pin_memory().to(self._device, non_blocking=True)
            self._page_rows = (version, rows)
        return self._page_rows[1]

    def bytes_alive(self) -> dict[str, int]:
        """Bytes of the pages held now, by content; `host_` goes before what the host holds."""
        on_host = self.table.pages_on_host
        on_gpu = self.table.pages_held - on_host
        keys = self._kv.bytes_per_page
        grads = self._grads.bytes_per_page if self._grads is not None else 0
        alive = {"kv_pages": on_gpu * keys, "page_gradients": on_gpu * grads}
        if self.table.gpu_slots < self.table.num_slots:
            alive |= {"host_kv_pages": on_host * keys, "host_page_gradients": on_host * grads}
        return alive


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which kernels add up gradients of numbers of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def segment_bytes(layers: Sequence[LayerShape], dtypes: Sequence[torch.dtype], tokens: int) -> int:
    """Bytes of the largest layer's segment where it is not stored but read, or added to."""
    sizes = zip(layers, dtypes, strict=True)
    return max(2 * tokens * layer.heads * layer.dim * dtype.itemsize for layer, dtype in sizes)


def _front(room: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The first of a room's bytes, uint8 [bytes], as a tensor."""
    return room[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
