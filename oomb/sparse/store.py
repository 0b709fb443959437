"""Page summaries of a step's history, kept until every chunk has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from oomb.cache import History
from oomb.cache.pool import LayerShape
from oomb.chunking import Read, Write
from oomb.config import Summary
from oomb.profiling.live_bytes import category
from oomb.sparse.summary import summarise, summary_width


class SummaryStore:
    """Summaries of complete pages; the memory for all of them is taken at once.

    A page that is not full yet has none: its summary would change with every token.

    Args:
        layers: what the pages of each layer hold, by layer number.
        pages_per_row: pages of each row.
        kind: of the summaries.
        history: whose pages they stand for.
        device: of the model.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        pages_per_row: Sequence[int],
        kind: Summary,
        history: History,
        device: torch.device,
    ) -> None:
        self._kind, self._history = kind, history
        self._page_size = history.table.page_size
        with category("page_summaries"):
            self._rows = {
                number: [
                    torch.empty(
                        (layer.heads, pages, summary_width(layer.dim, kind)),
                        dtype=layer.dtype,
                        device=device,
                    )
                    for pages in pages_per_row
                ]
                for number, layer in layers.items()
            }

    def add(self, layer: int, write: Write) -> None:
        """Summarise the pages that a write has completed, as they are stored."""
        size = self._page_size
        first, last = (token // size * size for token in (write.first, write.last))
        if first == last:
            return
        summaries = self._rows[layer][write.row]
        for at, segment in self._history.pieces(layer, write.row, first, last):
            pages = slice((first + at.start) // size, (first + at.stop) // size)
            keys = segment.k[0].unflatten(1, (-1, size))
            summaries[:, pages] = summarise(keys, self._kind)

    def of(self, layer: int, read: Read) -> torch.Tensor:
        """Summaries [kv heads, pages, W] of the complete pages that a read may choose from."""
        first = read.first // self._page_size
        count = (read.last - read.first) // self._page_size
        return self._rows[layer][read.row][:, first : first + count]

    def clear(self) -> None:
        """Nobody will choose any more."""
        self._rows.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(each.nbytes for rows in self._rows.values() for each in rows)
