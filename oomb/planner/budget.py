"""What a step may take of the GPU that is there: the budget `auto` gives pages, and a refusal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from oomb.config import EngineConfig, OffloadConfig
from oomb.planner.memory import GIB, USABLE, plan_step
from oomb.planner.model import ModelSizes

CERTAIN = (
    "weights",
    "weight gradients",
    "K/V pages",
    "page gradients",
    "segment ring",
    "segments in full precision",
)
"""Contents whose bytes are exact for every model; the others are estimates."""


@dataclass(frozen=True)
class Card:
    """A GPU as a step finds it.

    Attributes:
        name: of the GPU.
        total: bytes of its memory.
        taken: bytes that neither the model nor its gradients hold: an optimizer's state, other
            tensors, other programs.
    """

    name: str
    total: int
    taken: int

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> Card:
        """The GPU that a model is on."""
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        known = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        known += sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        tensors = max(0, torch.cuda.memory_allocated(device) - known)
        return cls(torch.cuda.get_device_name(device), total, others + tensors)


def page_budget(
    sizes: ModelSizes, config: EngineConfig, context: int, pages_per_row: list[int], card: Card
) -> int:
    """Bytes for pages and ring that a step leaves free.

    Args:
        sizes: the model's.
        config: the engine's settings, with offloading.
        context: tokens of the longest row.
        pages_per_row: pages that each row of the batch takes.
        card: the GPU.

    Returns:
        The budget; 0 where it would not hold the ring either.
    """
    least = replace(config, offload=replace(config.offload or OffloadConfig(), gpu_budget=0))
    plan = plan_step(sizes, least, context, pages_per_row=pages_per_row)
    ring = plan.gpu["segment ring"]
    budget = int(USABLE * card.total) - card.taken - (plan.gpu_peak - ring)
    return budget if budget > ring else 0


def refuse_what_cannot_fit(
    sizes: ModelSizes, config: EngineConfig, context: int, pages_per_row: list[int], card: Card
) -> None:
    """Refuse a step whose pages, weights and gradients alone are more than the GPU has.

    Args:
        sizes: the model's.
        config: the engine's settings, with a number as `gpu_budget`.
        context: tokens of the longest row.
        pages_per_row: pages that each row of the batch takes.
        card: the GPU.

    Raises:
        ValueError: they are; the message says what takes how much.
    """
    plan = plan_step(sizes, config, context, pages_per_row=pages_per_row)
    least = {name: plan.gpu[name] for name in CERTAIN if plan.gpu[name]}
    if card.taken:
        least["other tensors and programs"] = card.taken
    if sum(least.values()) <= card.total:
        return
    said = ", ".join(f"{name} {size / GIB:.1f}" for name, size in least.items())
    help_ = _help(sizes, config, context, pages_per_row, card)
    raise ValueError(
        f"a step over {len(pages_per_row)} x {context:,} tokens needs "
        f"{sum(least.values()) / GIB:.1f} GiB of GPU memory besides activations ({said}), but "
        f"{card.name} has {card.total / GIB:.1f}; {help_}"
    )


def _help(
    sizes: ModelSizes,
    config: EngineConfig,
    context: int,
    pages_per_row: list[int],
    card: Card,
) -> str:
    if config.offload is None:
        offloaded = replace(config, offload=OffloadConfig())
        other = plan_step(sizes, offloaded, context, pages_per_row=pages_per_row)
        if other.gpu_peak + card.taken <= USABLE * card.total:
            host = other.host_total / GIB
            return f"use offload=oomb.OffloadConfig(), which puts {host:.1f} GiB on the host"
    return "see `oomb plan` for what to change"
