"""Where every byte of a step goes, before it runs: `oomb plan`.

Closed forms, from a model's sizes and the engine's settings. A step's GPU memory is highest at one
of two moments of the sweep: before the backward of the chunks that are alive first, when no weight
gradient exists yet, or in a later chunk's, when all of them do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from oomb.config import EngineConfig, OffloadConfig
from oomb.fill_outputs import output_bytes
from oomb.loss import block_size
from oomb.offload import Residency
from oomb.planner.model import ModelSizes
from oomb.segments import segment_pages

GIB = 2**30
OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
"""Numbers of state per parameter, in the parameter's dtype, as torch keeps them."""
USABLE = 0.97
"""Of a GPU's memory; the rest goes to its context, libraries' workspaces and gaps."""
MOST_CHUNKS = 1 << 40
LOGIT_COPIES = 4
"""Blocks of logits alive at a time, with their gradients and what kernels need beside them."""


@dataclass(frozen=True)
class Machine:
    """Memory to fit into.

    Attributes:
        name: what it is.
        gpu: bytes of GPU memory.
        host: bytes of host memory.
    """

    name: str
    gpu: int
    host: int


@dataclass(frozen=True)
class Plan:
    """A step's memory.

    Attributes:
        context: tokens of the sequence.
        gpu: bytes on the GPU at the step's peak, by content.
        host: bytes on the host, by content.
    """

    context: int
    gpu: dict[str, int]
    host: dict[str, int]

    @property
    def gpu_peak(self) -> int:
        """All of the GPU's."""
        return sum(self.gpu.values())

    @property
    def host_total(self) -> int:
        """All of the host's."""
        return sum(self.host.values())

    def fits(self, machine: Machine) -> bool:
        """Whether a machine has room for it."""
        return self.gpu_peak <= USABLE * machine.gpu and self.host_total <= machine.host


def plan_step(
    sizes: ModelSizes,
    config: EngineConfig,
    context: int,
    *,
    pages_per_row: list[int] | None = None,
    optimizer: str = "none",
) -> Plan:
    """Plan one step.

    Args:
        sizes: the model's.
        config: the engine's settings.
        context: tokens of the longest row.
        pages_per_row: pages that each row of the batch takes; None for one row with one document.
        optimizer: one of `OPTIMIZERS`.

    Returns:
        The plan.

    Raises:
        ValueError: the offload budget does not hold the ring.
    """
    count = -(-context // config.chunk_size)
    if pages_per_row is None:
        pages_per_row = [(count - 1) * config.chunk_size // config.page_size]
    rows = len(pages_per_row)
    chunk = min(config.chunk_size, context)
    live = min(config.live_chunks, count)
    pages = _pages(sizes, config, pages_per_row)
    outputs = _fill_outputs(sizes, config, rows * config.chunk_size * max(0, count - live))
    activations = rows * chunk * _activation_bytes(sizes, config)
    grad_bytes = torch.promote_types(config.grad_dtype, sizes.dtype).itemsize
    gradients = sizes.trained * grad_bytes * (2 if config.restore_grads else 1)
    head = rows * block_size(config.chunk_size) * sizes.vocab * sizes.itemsize * LOGIT_COPIES
    head += 2 * rows * chunk * sizes.hidden * sizes.itemsize
    head_gradient = sizes.vocab * sizes.hidden * grad_bytes  # it comes first
    first = {
        "activations": live * activations,
        "weight gradients": max(head_gradient, gradients - activations),
    }
    later = {"activations": activations, "weight gradients": gradients}
    moment = first if count <= live or sum(first.values()) > sum(later.values()) else later
    on_host = config.offload is not None and config.offload.fill_outputs
    gpu = {
        "weights": sizes.weights,
        "optimizer state": OPTIMIZERS[optimizer] * sizes.trained * sizes.itemsize,
        **moment,
        "logits and hidden states": head,
        **pages["gpu"],
        "fill outputs": 0 if on_host else outputs,
    }
    host = {**pages["host"], "fill outputs": outputs if on_host else 0}
    return Plan(context, gpu, host)


def longest_context(
    sizes: ModelSizes, config: EngineConfig, machine: Machine, *, optimizer: str = "none"
) -> int:
    """The longest context, in whole chunks, whose step fits; 0 where not even one chunk's does."""

    def fits(chunks: int) -> bool:
        context = chunks * config.chunk_size
        try:
            return plan_step(sizes, config, context, optimizer=optimizer).fits(machine)
        except ValueError:  # the budget does not hold the ring's longer segments
            return False

    low, high = 0, 1
    while high < MOST_CHUNKS and fits(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * config.chunk_size


def changes(
    sizes: ModelSizes,
    config: EngineConfig,
    context: int,
    machine: Machine,
    *,
    optimizer: str = "none",
) -> list[tuple[str, Plan]]:
    """Single changes of the settings after which a step fits, the cheapest first."""
    bf16 = torch.bfloat16
    tried = [
        ("page_grad_dtype=torch.bfloat16", {"page_grad_dtype": bf16}),
        ("grad_dtype=torch.bfloat16", {"grad_dtype": bf16}),
        ("offload=oomb.OffloadConfig()", {"offload": OffloadConfig()}),
        ("live_chunks=1", {"live_chunks": 1}),
        ("activation_policy='selective'", {"activation_policy": "selective", "live_chunks": 1}),
        ("activation_policy='layer'", {"activation_policy": "layer", "live_chunks": 1}),
        (f"chunk_size={config.chunk_size // 2}", {"chunk_size": config.chunk_size // 2}),
        ("page_dtype='fp8'", {"page_dtype": "fp8"}),
    ]
    found = []
    for name, change in tried:
        if all(getattr(config, key) == value for key, value in change.items()):
            continue
        try:
            other = plan_step(sizes, replace(config, **change), context, optimizer=optimizer)
        except ValueError:  # half a chunk may not hold whole pages
            continue
        if other.fits(machine):
            found.append((name, other))
    return found


def _pages(
    sizes: ModelSizes, config: EngineConfig, pages_per_row: list[int]
) -> dict[str, dict[str, int]]:
    residency = Residency.plan(
        sizes.layers,
        pages_per_row=pages_per_row,
        page_size=config.page_size,
        segment_pages=segment_pages(config, pages_per_row),
        page_grad_dtype=config.page_grad_dtype,
        gpu_budget=_budget(config),
        ring_depth=config.offload.ring_depth if config.offload is not None else 0,
        page_dtype=config.page_dtype,
        rounding=config.rounds_stochastically,
    )
    keys, gradients = sum(residency.key_bytes), sum(residency.gradient_bytes)
    return {
        "gpu": {
            "K/V pages": residency.gpu_slots * keys,
            "page gradients": residency.gpu_slots * gradients,
            "segment ring": residency.ring_bytes,
            "segments in full precision": residency.scratch_bytes,
        },
        "host": {
            "K/V pages": residency.host_slots * keys,
            "page gradients": residency.host_slots * gradients,
        },
    }


def _budget(config: EngineConfig) -> int | None:
    if config.offload is None:
        return None
    return 0 if config.offload.gpu_budget == "auto" else config.offload.gpu_budget


def _fill_outputs(sizes: ModelSizes, config: EngineConfig, tokens: int) -> int:
    if not config.keep_fill_outputs:
        return 0
    return tokens * len(sizes.layers) * _output_bytes(sizes)


def _output_bytes(sizes: ModelSizes) -> int:
    """Attention output and log-sum-exp of one token and layer."""
    return sum(output_bytes(sizes.layers[0], sizes.query_heads, tokens=1))


def _activation_bytes(sizes: ModelSizes, config: EngineConfig) -> int:
    """Of a chunk's activations, per token; what the fill keeps is not counted twice."""
    count, whole = len(sizes.layers), sizes.saved * sizes.itemsize
    output = _output_bytes(sizes)
    if config.activation_policy == "keep":
        return count * (whole - (output if config.keep_fill_outputs else 0))
    per_layer = sizes.hidden * sizes.itemsize
    if config.activation_policy == "selective" and not config.keep_fill_outputs:
        per_layer += output
    return count * per_layer + 2 * whole  # one layer that is computed again, and its gradients
