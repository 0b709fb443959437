"""The history: all that attention ever sees of the pages of earlier chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oomb.cache.pool import LayerShape, PagePool
from oomb.cache.table import PageTable
from oomb.chunking import Read
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


class History:
    """K/V pages and their gradients for one step, all resident on one device."""

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
    ) -> None:
        self.table = PageTable(
            pages_per_row=pages_per_row, page_size=page_size, segment_pages=segment_pages
        )
        self._layers = layers
        self._device = device
        self._grad_dtype = page_grad_dtype
        with category("kv_pages"):
            self._kv = self._pool()
        self._grads: PagePool | None = None
        self._page_rows: tuple[int, torch.Tensor] | None = None  # table's version, on the device

    def _pool(self, **kwargs) -> PagePool:
        return PagePool(
            self._layers,
            slots=self.table.num_slots,
            tokens_per_slot=self.table.segment_pages * self.table.page_size,
            device=self._device,
            **kwargs,
        )

    def open_gradients(self) -> None:
        """Make zeroed page gradients for everything held; called once, when the fill is over."""
        with category("page_gradients"):
            self._grads = self._pool(dtype=self._grad_dtype, zero=True)

    def write(self, layer: int, row: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, each [kv heads, tokens, dim], as tokens `first` and on; slots are held."""
        for at, segment in self.pieces(layer, row, first, first + k.shape[1]):
            segment.k[0].copy_(k[:, at])
            segment.v[0].copy_(v[:, at])

    def pieces(
        self, layer: int, row: int, first: int, last: int
    ) -> Iterator[tuple[slice, Segment]]:
        """`segments`, each behind the token range it covers, counted from `first`."""
        for segment in self.segments(layer, row, first, last):
            start = segment.first - first
            yield slice(start, start + segment.k.shape[2]), segment

    def segments(self, layer: int, row: int, first: int, last: int) -> Iterator[Segment]:
        """Tokens [first, last) of a row, a segment at a time, in order."""
        return self._cut(layer, row, self.table.segments(first, last))

    def seen(self, layer: int, read: Read, window: int | None) -> Iterator[Segment]:
        """Segments of which some query of a read sees a key, in order.

        A segment is there until the next one is asked for.
        """
        return self._cut(layer, read.row, self.table.seen(read, window))

    def own_gradients(
        self, layer: int, row: int, first: int, last: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """What later chunks left for tokens [first, last): ranges counted from `first`, views.

        Ranges for which nobody left anything may be missing.
        """
        for at, page in self.pieces(layer, row, first, last):
            yield at, page.grad_k, page.grad_v

    def _cut(self, layer: int, row: int, pieces: list[tuple[int, int, int]]) -> Iterator[Segment]:
        size = self.table.segment_pages * self.table.page_size
        for index, start, stop in pieces:
            slot = self.table.slot(row, index)
            k, v = self._kv.tokens(layer, slot, start, stop)
            grad_k = grad_v = None
            if self._grads is not None:
                grad_k, grad_v = self._grads.tokens(layer, slot, start, stop)
            yield Segment(index * size + start, k, v, grad_k, grad_v)

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
        """Bytes of the pages held now, by content."""
        tokens = self.table.pages_held * self.table.page_size
        grads = self._grads.bytes_per_token if self._grads is not None else 0
        return {"kv_pages": tokens * self._kv.bytes_per_token, "page_gradients": tokens * grads}
