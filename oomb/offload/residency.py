"""Which segments stay on the GPU: as many of the first as the budget holds beside the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oomb.cache.history import segment_bytes, wide
from oomb.cache.pool import LayerShape, gradient_layouts, key_layouts

STAGING_BUFFERS = 2
"""In which a chunk's K and V wait for their way to the host."""


@dataclass(frozen=True)
class Residency:
    """Where a step's slots are, and what that takes.

    Attributes:
        gpu_slots, host_slots: how many of the slots are where.
        key_bytes, gradient_bytes: of one slot, by layer.
        ring_bytes: GPU memory of the ring and of the staging buffers; 0 where nothing is on the
            host.
        scratch_bytes: GPU memory in which segments are read, or added to, that are stored in
            other numbers; besides the budget.
    """

    gpu_slots: int
    host_slots: int
    key_bytes: Sequence[int]
    gradient_bytes: Sequence[int]
    ring_bytes: int
    scratch_bytes: int

    @classmethod
    def plan(
        cls,
        layers: list[LayerShape],
        *,
        pages_per_row: list[int],
        page_size: int,
        segment_pages: int,
        page_grad_dtype: torch.dtype | None,
        gpu_budget: int | None,
        ring_depth: int,
        page_dtype: str | None = None,
        rounding: bool = False,
    ) -> Residency:
        """Decide.

        Args:
            layers: what each layer stores.
            pages_per_row: pages of each row.
            page_size: tokens of a page.
            segment_pages: pages of a segment, which a slot holds.
            page_grad_dtype: as configured; None where there are no page gradients.
            gpu_budget: bytes for pages and ring on the GPU; 0 asks for as few as possible, None
                has all there.
            ring_depth: buffers of the ring.
            page_dtype: as configured.
            rounding: whether page gradients are rounded into their pages from scratch memory.

        Returns:
            The residency.

        Raises:
            ValueError: the budget does not hold the ring, nor all of the pages.
        """
        slots = sum(-(-pages // segment_pages) for pages in pages_per_row)
        tokens_per_slot = segment_pages * page_size
        keys = [
            layout.nbytes for layout in key_layouts(layers, tokens_per_slot, page_size, page_dtype)
        ]
        grads = [
            layout.nbytes
            for dtype in ([page_grad_dtype] if page_grad_dtype else [])
            for layout in gradient_layouts(layers, tokens_per_slot, page_size, dtype)
        ]
        scratch = 0
        if page_dtype is not None:
            dtypes = [layer.dtype for layer in layers]
            scratch += segment_bytes(layers, dtypes, tokens_per_slot)
        if rounding and grads:
            dtypes = [wide(layer.dtype) for layer in layers]
            scratch += segment_bytes(layers, dtypes, tokens_per_slot)
        per_slot = sum(keys) + sum(grads)
        if gpu_budget is None or slots * per_slot <= gpu_budget:
            return cls(slots, 0, keys, grads, 0, scratch)
        ring = (ring_depth + STAGING_BUFFERS) * max(keys) + ring_depth * max(grads, default=0)
        if 0 < gpu_budget < ring:
            raise ValueError(
                f"gpu_budget must hold the ring's {ring_depth} buffers of {tokens_per_slot} tokens "
                f"({ring} bytes), got {gpu_budget}; raise it, lower segment_pages or ring_depth, "
                "or use 0 for as little as possible"
            )
        gpu_slots = max(0, gpu_budget - ring) // per_slot
        return cls(gpu_slots, slots - gpu_slots, keys, grads, ring, scratch)

    def host_bytes(self) -> tuple[list[int], list[int]]:
        """Host memory for K and V and for their gradients, by layer."""
        return tuple(
            [self.host_slots * each for each in sizes]
            for sizes in (self.key_bytes, self.gradient_bytes)
        )
