"""A step's selections: made once for each chunk and layer, used again until the chunk is swept."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oomb.cache import History
from oomb.cache.pool import LayerShape
from oomb.chunking import Chunk, ChunkPlan, Read
from oomb.config import SparseConfig
from oomb.profiling.live_bytes import category
from oomb.profiling.stage import stage
from oomb.sparse.selection import Selection, select_pages
from oomb.sparse.store import SummaryStore

Selections = Mapping[Read, Selection]
"""What each read chose; one that is missing reads all of its history."""


class Selector:
    """Chooses the pages that a chunk's queries read, and remembers them.

    A chunk chooses in its first forward, which is the fill's, or the sweep's for the last chunk.
    Later forwards and the backward read the same pages: gradients are those of one function.

    Args:
        config: how to choose; None where attention is dense: every method is a no-op then.
        layers: what the pages of each layer that chooses hold, by layer number.
        plan: the step's chunks.
        history: its pages.
        device: of the model.
    """

    def __init__(
        self,
        config: SparseConfig | None,
        layers: Mapping[int, LayerShape],
        plan: ChunkPlan,
        history: History,
        device: torch.device,
    ) -> None:
        self._config = config
        self._page_size = history.table.page_size
        self._layers = layers if config is not None else {}
        kind = config.summary if config is not None else "mean"
        self._summaries = SummaryStore(self._layers, plan.pages_per_row, kind, history, device)
        self._chosen: dict[int, dict[int, Selections]] = {}  # by chunk and layer

    def pages_written(self, chunk: Chunk, layer: int) -> None:
        """The chunk's K and V of a layer are in pages: summarise those that are complete."""
        if layer in self._layers and chunk.writes:
            with stage("selection", layer), torch.no_grad():
                for write in chunk.writes:
                    self._summaries.add(layer, write)

    def choose(self, chunk: Chunk, layer: int, q: torch.Tensor) -> Selections:
        """What a chunk's queries q [B, H, n, D] read; as before, if they have been asked before."""
        if layer not in self._layers or not chunk.reads:
            return {}
        layers = self._chosen.setdefault(chunk.index, {})
        if layer not in layers:
            with stage("selection", layer), category("selections"):
                found = {read: self._select(read, layer, q) for read in chunk.reads}
            layers[layer] = {read: each for read, each in found.items() if each is not None}
        return layers[layer]

    def _select(self, read: Read, layer: int, q: torch.Tensor) -> Selection | None:
        queries = q[read.row, :, read.start : read.stop]
        summaries = self._summaries.of(layer, read)
        return select_pages(queries, summaries, self._config, page_size=self._page_size)

    def drop(self, chunk: Chunk) -> None:
        """Forget what a chunk chose that is swept."""
        self._chosen.pop(chunk.index, None)

    def all_chosen(self) -> None:
        """The last chunk has chosen: no summary is needed any more."""
        self._summaries.clear()

    def close(self) -> None:
        """The step is over, or abandoned."""
        self._summaries.clear()
        self._chosen.clear()

    def bytes_alive(self) -> dict[str, int]:
        """Bytes held, by content."""
        selections = sum(
            each.pages.nbytes
            for layers in self._chosen.values()
            for reads in layers.values()
            for each in reads.values()
        )
        return {"page_summaries": self._summaries.nbytes, "selections": selections}
