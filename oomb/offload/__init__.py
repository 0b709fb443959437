"""Pages beyond the GPU's memory: host slabs, copies in the background, a ring of segments.

`tier.py` says what copies and events are; `cuda.py` does it with streams, `simulated.py` with
threads where there is no GPU. `ring.py` streams segments through a few GPU buffers, `history.py` is
the history that attention sees.
"""

from __future__ import annotations

import torch

from oomb.cache import History, StochasticRounding
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
    layers: list[AttentionLayer],
    store: OffloadStore | None,
    config: EngineConfig,
    plan: ChunkPlan,
    *,
    rows: int,
    gradients: bool,
    device: torch.device,
    step: int | None = None,
) -> History:
    """A step's history: on two tiers where there is a store and the budget does not hold all.

    Args:
        layers: attention layers.
        store: what the engine keeps for offloading, or None.
        config: the engine's settings.
        plan: the step's chunks.
        rows: rows of the batch.
        gradients: whether there will be page gradients.
        device: of the model.
        step: number of the step, so that each rounds with random numbers of its own.

    Returns:
        The history; the host memory of the whole step is there.

    Raises:
        ValueError: a budget is too small; nothing was taken.
        MemoryError: the host does not give what the step needs.
    """
    shape = {
        "pages_per_row": plan.pages_per_row,
        "page_size": config.page_size,
        "segment_pages": segment_pages(config, plan.pages_per_row),
        "page_grad_dtype": config.page_grad_dtype,
        "device": device,
        "page_dtype": config.page_dtype,
        "rounding": _rounding(config, device, step) if gradients else None,
    }
    shapes = [layer.shape for layer in layers]
    if store is None:
        return History(shapes, **shape)
    residency = reserve_for_step(layers, store, config, plan, rows=rows, gradients=gradients)
    if not residency.host_slots:
        return History(shapes, **shape)
    return OffloadedHistory(shapes, **shape, store=store, residency=residency)


def reserve_for_step(
    layers: list[AttentionLayer],
    store: OffloadStore,
    config: EngineConfig,
    plan: ChunkPlan,
    *,
    rows: int,
    gradients: bool,
) -> Residency:
    """Make sure of all the host memory that a step will ask for, before it takes anything.

    Args:
        layers: attention layers.
        store: what the engine keeps for offloading.
        config: the engine's settings.
        plan: the step's chunks.
        rows: rows of the batch.
        gradients: whether there will be page gradients.

    Returns:
        Which of the step's slots are where.

    Raises:
        ValueError: a budget is too small; nothing was taken.
        MemoryError: the host does not give what the step needs.
    """
    residency = Residency.plan(
        [layer.shape for layer in layers],
        pages_per_row=plan.pages_per_row,
        page_size=config.page_size,
        segment_pages=segment_pages(config, plan.pages_per_row),
        page_grad_dtype=config.page_grad_dtype if gradients else None,
        gpu_budget=store.gpu_budget,
        ring_depth=store.config.ring_depth,
        page_dtype=config.page_dtype,
        rounding=config.rounds_stochastically,
    )
    wanted = host_memory(residency) if residency.host_slots else {}
    filled = plan.chunks[: -config.live_chunks]
    if gradients and config.keep_fill_outputs and store.config.fill_outputs and filled:
        wanted |= outputs_on_host(layers, rows * filled[-1].stop)
    store.reserve(wanted)
    return residency


def _rounding(
    config: EngineConfig, device: torch.device, step: int | None
) -> StochasticRounding | None:
    if not config.rounds_stochastically:
        return None
    return StochasticRounding(device, [torch.initial_seed(), step or 0])
