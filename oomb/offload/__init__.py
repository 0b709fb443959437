"""Pages beyond the GPU's memory: host slabs, copies in the background, a ring of segments.

`tier.py` says what copies and events are; `cuda.py` does it with streams, `simulated.py` with
threads where there is no GPU. `ring.py` streams segments through a few GPU buffers, `history.py` is
the history that attention sees.
"""

from __future__ import annotations

import torch

from oomb.cache import History
from oomb.cache.pool import LayerShape
from oomb.chunking import ChunkPlan
from oomb.config import EngineConfig
from oomb.offload.history import OffloadedHistory, host_memory
from oomb.offload.outputs import HostOutputs
from oomb.offload.outputs import host_memory as outputs_on_host
from oomb.offload.residency import Residency
from oomb.offload.store import OffloadStore
from oomb.probes import AttentionLayer
from oomb.segments import segment_pages

__all__ = [
    "HostOutputs",
    "OffloadStore",
    "OffloadedHistory",
    "Residency",
    "make_history",
    "reserve_for_step",
]


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
    residency = _residency(
        layers,
        store,
        pages_per_row,
        page_size,
        segment_pages,
        page_grad_dtype if gradients else None,
    )
    if not residency.host_slots:
        return History(layers, **shape)
    return OffloadedHistory(layers, **shape, store=store, residency=residency)


def reserve_for_step(
    layers: list[AttentionLayer],
    store: OffloadStore,
    config: EngineConfig,
    plan: ChunkPlan,
    *,
    rows: int,
    gradients: bool,
) -> None:
    """Make sure of all the host memory that a step will ask for, before it takes anything.

    Args:
        layers: attention layers.
        store: what the engine keeps for offloading.
        config: the engine's settings.
        plan: the step's chunks.
        rows: rows of the batch.
        gradients: whether there will be page gradients.

    Raises:
        ValueError: a budget is too small; nothing was taken.
        MemoryError: the host does not give what the step needs.
    """
    residency = _residency(
        [layer.shape for layer in layers],
        store,
        plan.pages_per_row,
        config.page_size,
        segment_pages(config, plan.pages_per_row),
        config.page_grad_dtype if gradients else None,
    )
    wanted = host_memory(residency) if residency.host_slots else {}
    filled = plan.chunks[: -config.live_chunks]
    if gradients and config.keep_fill_outputs and store.config.fill_outputs and filled:
        wanted |= outputs_on_host(layers, rows * filled[-1].stop)
    store.reserve(wanted, idle=True)


def _residency(
    layers: list[LayerShape],
    store: OffloadStore,
    pages_per_row: list[int],
    page_size: int,
    segment_pages: int,
    page_grad_dtype: torch.dtype | None,
) -> Residency:
    return Residency.plan(
        layers,
        slots=sum(-(-pages // segment_pages) for pages in pages_per_row),
        tokens_per_slot=segment_pages * page_size,
        page_grad_dtype=page_grad_dtype,
        gpu_budget=store.gpu_budget,
        ring_depth=store.config.ring_depth,
    )
