"""A history whose first segments stay on the GPU and whose others live on the host.

Attention sees no difference but one: a segment is there until the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from oomb.cache import History, PagePool, StochasticRounding, Visit
from oomb.cache.layout import SlotLayout
from oomb.cache.pool import LayerShape
from oomb.chunking import Chunk
from oomb.offload.residency import STAGING_BUFFERS, Residency
from oomb.offload.ring import HostPages, Load, SegmentRing
from oomb.offload.staging import Staging
from oomb.offload.store import OffloadStore
from oomb.offload.tier import Pairs
from oomb.profiling.live_bytes import category

KEYS, GRADIENTS = "K/V pages", "page gradients"
"""What host memory is asked for."""


def host_memory(residency: Residency) -> dict[str, list[int]]:
    """What a step asks of the host for its pages: bytes by content and layer."""
    keys, gradients = residency.host_bytes()
    return {KEYS: keys, GRADIENTS: gradients}


class OffloadedHistory(History):
    """K/V pages and their gradients for one step, on two tiers.

    Args:
        layers: what each layer stores.
        pages_per_row: pages of each row.
        page_size: tokens of a page.
        segment_pages: pages of a segment.
        page_grad_dtype: in which page gradients accumulate.
        device: of the model.
        store: the tier, and host memory that is reserved for the step.
        residency: which slots are where.
        page_dtype: "fp8", or None for K and V as the model makes them.
        rounding: rounds page gradients into their pages; None has kernels add there.
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
        store: OffloadStore,
        residency: Residency,
        page_dtype: str | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        super().__init__(
            layers,
            pages_per_row=pages_per_row,
            page_size=page_size,
            segment_pages=segment_pages,
            page_grad_dtype=page_grad_dtype,
            device=device,
            gpu_slots=residency.gpu_slots,
            page_dtype=page_dtype,
            rounding=rounding,
        )
        self.resident = False
        self._tier, self._store = store.tier, store
        self._host_slots = residency.host_slots
        self._host = HostPages(self._host_pool(KEYS, self._key_layouts))
        with category("segment_ring"):
            self._ring = SegmentRing(
                self._tier, self._host, store.config.ring_depth, device,
                poison=store.config.poison,
            )  # fmt: skip
            rooms = [self._ring.room_for_keys() for _ in range(STAGING_BUFFERS)]
        self._staging = Staging(self._tier, rooms, poison=store.config.poison)

    def _host_pool(self, what: str, layouts: list[SlotLayout]) -> PagePool:
        return PagePool.over(self._store.pieces(what), layouts, slots=self._host_slots)

    def open_gradients(self) -> None:
        """See `History`; on the host, a segment's gradients begin with their first term."""
        super().open_gradients()
        self._host.gradients = self._host_pool(GRADIENTS, self._gradient_layouts)
        with category("segment_ring"):
            self._ring.open_gradients()

    def close(self) -> None:
        """Kernels that come next may take over this step's GPU memory, and copies its slabs."""
        self._ring.announce(())
        self._tier.settle()

    # -- what is to come --------------------------------------------------------------------------

    def expect(self, chunk: Chunk, visits: Sequence[Visit]) -> None:
        """Say what a chunk will ask for, in order, so that it is on its way by then."""
        self._ring.announce(load for visit in visits for load in self._loads(chunk, visit))

    def _loads(self, chunk: Chunk, visit: Visit) -> Iterator[Load]:
        if visit.what == "own":
            for write in chunk.writes:
                for index, start, stop in self.table.segments(write.first, write.last):
                    slot = self.table.slot(write.row, index)
                    yield from self._own_load(visit.layer, slot, start, stop)
            return
        for read in chunk.reads:
            for index, start, stop in self.table.seen(read, visit.window):
                slot = self.table.slot(read.row, index)
                if self._on_host(slot):
                    gradients = visit.what == "gradients"
                    yield self._load(visit.layer, slot, start, stop, gradients=gradients)

    def _own_load(self, layer: int, slot: int, start: int, stop: int) -> Iterator[Load]:
        """Nothing, where no later chunk has left a term."""
        at = slot - self.table.gpu_slots
        if (layer, at) in self._host.touched:
            yield Load(layer, at, start, stop, keys=False, gradients=True, returns=False)

    def _load(self, layer: int, slot: int, start: int, stop: int, *, gradients: bool) -> Load:
        at = slot - self.table.gpu_slots
        return Load(layer, at, start, stop, keys=True, gradients=gradients, returns=gradients)

    def _on_host(self, slot: int) -> bool:
        return slot >= self.table.gpu_slots

    # -- what is asked for ------------------------------------------------------------------------

    @contextmanager
    def _stored(
        self, layer: int, slot: int, start: int, stop: int, gradients: bool
    ) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        if self._on_host(slot):
            stored = self._ring.holding(self._load(layer, slot, start, stop, gradients=gradients))
        else:
            stored = super()._stored(layer, slot, start, stop, gradients)
        with stored as (keys, grads):
            yield keys, grads

    def _own_gradients(
        self, layer: int, slot: int, start: int, stop: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if not self._on_host(slot):
            yield from super()._own_gradients(layer, slot, start, stop)
            return
        for load in self._own_load(layer, slot, start, stop):
            with self._ring.holding(load) as (_, grads):
                yield self._gradients_in(layer, grads, start, stop)

    def _write(self, layer: int, slot: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if not self._on_host(slot):
            super()._write(layer, slot, start, k, v)
            return
        at, stop = slot - self.table.gpu_slots, start + k.shape[1]

        def fill(room: torch.Tensor) -> Pairs:
            self._put(layer, room, start, k, v)
            layout = self._key_layouts[layer]
            return layout.pairs(self._host.keys.slot(layer, at), room, start, stop)

        self._host.written["keys", layer, at] = self._staging.send(fill, layer)
