"""Pages beyond the GPU's memory: host slabs, copies in the background, a ring of segments.

`tier.py` says what copies and events are; `cuda.py` does it with streams, `simulated.py` with
threads where there is no GPU. `ring.py` streams segments through a few GPU buffers, `history.py` is
the history that attention sees.
"""

from __future__ import annotations

import torch

from oomb.cache import History
from oomb.cache.pool import LayerShape
from oomb.offload.history import OffloadedHistory
from oomb.offload.outputs import HostOutputs
from oomb.offload.residency import Residency
from oomb.offload.store import OffloadStore

__all__ = ["HostOutputs", "OffloadStore", "OffloadedHistory", "Residency", "make_history"]


def make_history(
    layers: list[LayerShape],
    store: OffloadStore | None,
    *,
    pages_per_row: list[int],
    page_size: int,
    segment_pages: int,
    page_grad_dtype: torch.dtype,
    gradients: bool,
    device: torch.device,
) -> History:
    """A step's history: on two tiers where there is a store and the budget does not hold all.

    Args:
        layers: what each layer stores.
        store: what the engine keeps for offloading, or None.
        pages_per_row: pages of each row.
        page_size: tokens of a page.
        segment_pages: pages of a segment.
        page_grad_dtype: in which page gradients accumulate.
        gradients: whether there will be page gradients.
        device: of the model.

    Returns:
        The history.

    Raises:
        ValueError: a budget is too small; nothing was taken.
        MemoryError: the host does not give what the step needs.
    """
    shape = {
        "pages_per_row": pages_per_row,
        "page_size": page_size,
        "segment_pages": segment_pages,
        "page_grad_dtype": page_grad_dtype,
        "device": device,
    }
    if store is None:
        return History(layers, **shape)
    residency = Residency.plan(
        layers,
        slots=sum(-(-pages // segment_pages) for pages in pages_per_row),
        tokens_per_slot=segment_pages * page_size,
        page_grad_dtype=page_grad_dtype if gradients else None,
        gpu_budget=store.gpu_budget,
        ring_depth=store.config.ring_depth,
    )
    if not residency.host_slots:
        return History(layers, **shape)
    return OffloadedHistory(layers, **shape, store=store, residency=residency)
