"""The history: all that attention ever sees of the pages of earlier chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from oomb.cache.pool import LayerShape, PagePool
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

    Attributes:
        resident: whether every page is in the pool at any time, so that `pages` can be asked for.
        table: which pages are held, and where.
    """

    resident = True

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
    ) -> None:
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
        with category("kv_pages"):
            self._kv = self._pool()
        self._grads: PagePool | None = None
        self._page_rows: tuple[int, torch.Tensor] | None = None  # table's version, on the device

    def _pool(self, **kwargs) -> PagePool:
        return PagePool(
            self._layers,
            slots=self.table.gpu_slots,
            tokens_per_slot=self._segment_tokens,
            device=self._device,
            **kwargs,
        )

    def open_gradients(self) -> None:
        """Make zeroed page gradients for everything held; called once, when the fill is over."""
        with category("page_gradients"):
            self._grads = self._pool(dtype=self._grad_dtype, zero=True)

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
        own_k, own_v = self._kv.tokens(layer, slot, start, start + k.shape[1])
        own_k[0].copy_(k)
        own_v[0].copy_(v)

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
        return self._cut(layer, row, self.table.segments(first, last), gradients)

    def seen(
        self, layer: int, read: Read, window: int | None, *, gradients: bool = False
    ) -> Iterator[Segment]:
        """The same for a read, less the segments that a window hides from all its queries."""
        return self._cut(layer, read.row, self.table.seen(read, window), gradients)

    def _cut(
        self, layer: int, row: int, pieces: list[tuple[int, int, int]], gradients: bool
    ) -> Iterator[Segment]:
        for index, start, stop in pieces:
            yield from self._piece(layer, row, index, start, stop, gradients)

    def _piece(
        self, layer: int, row: int, index: int, start: int, stop: int, gradients: bool
    ) -> Iterator[Segment]:
        slot = self.table.slot(row, index)
        keys = self._kv.tokens(layer, slot, start, stop)
        grads = self._grads.tokens(layer, slot, start, stop) if gradients else (None, None)
        yield Segment(index * self._segment_tokens + start, *keys, *grads)

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
        yield self._grads.tokens(layer, slot, start, stop)

    def pages(self, layer: int, row: int, first: int, last: int) -> Pages:
        """The pages of tokens [first, last) of a row; `first` is a page's first token."""
        size = self.table.page_size
        assert first % size == 0, f"token {first} does not begin a page of {size}"
        rows = self._rows_on_device()[row, first // size : -(-last // size)]
        grads = (None, None) if self._grads is None else self._grads.all_tokens(layer)
        return Pages(*self._kv.all_tokens(layer), *grads, rows, size)

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
        on_host = self.table.pages_on_host * self.table.page_size
        on_gpu = self.table.pages_held * self.table.page_size - on_host
        keys = self._kv.bytes_per_token
        grads = self._grads.bytes_per_token if self._grads is not None else 0
        alive = {"kv_pages": on_gpu * keys, "page_gradients": on_gpu * grads}
        if not self.resident:
            alive |= {"host_kv_pages": on_host * keys, "host_page_gradients": on_host * grads}
        return alive
