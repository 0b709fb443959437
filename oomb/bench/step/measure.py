"""One side at one length: sustained rate, peak memory, loss and gradient norm."""

from __future__ import annotations

import gc
from typing import Any

import torch

from oomb.bench.step.recorded import summary
from oomb.bench.step.sides import OurSide, Side
from oomb.bench.step.split import time_split
from oomb.bench.timing import peak_gib, reset_peak, timed

SHORT_WARM_UP = 32768
LONG = 131072
"""From this many tokens on, a shorter step warms up: a whole one takes minutes."""


def measure_length(
    side: Side, tokens: int, *, device: torch.device, seconds: float, warmup: bool, split: bool
) -> dict[str, Any]:
    """Repeat a step for a while.

    Args:
        side: what runs it.
        tokens: length of the sequence.
        device: where.
        seconds: measured time to repeat for; at least one step is measured.
        warmup: whether an unmeasured step goes before.
        split: whether one more step runs under the profiler, which needs a GPU.

    Returns:
        JSON-ready figures.

    Raises:
        OutOfMemoryError: from torch.
    """
    ids = token_ids(side, tokens, device)
    side.reserve(tokens)
    if warmup:
        clear(side)
        side.run(ids if tokens < LONG else ids[:, :SHORT_WARM_UP])
    clear(side)
    reset_peak(device)
    loss, times = _repeat(side, ids, device, seconds)
    figures: dict[str, Any] = {
        "tokens_per_s": tokens * len(times) / sum(times),
        "step_seconds": times,
        "peak_gib": peak_gib(device),
        "host_gib": side.host_bytes() / 2**30,
        "loss": float(loss),
        "grad_norm": _grad_norm(side.model),
    }
    if split:
        clear(side)
        figures["split"] = time_split(lambda: side.run(ids))
    return figures


def record_step(side: OurSide, ids: torch.Tensor) -> dict[str, Any]:
    """Run one more step with a recorder.

    Args:
        side: holds the engine.
        ids: [1, N] on the model's device.

    Returns:
        As `summary`.
    """
    clear(side)
    with side.recorded() as recorder:
        _, seconds = timed(lambda: side.run(ids), ids.device)
    return summary(recorder.recording(), seconds)


def _repeat(
    side: Side, ids: torch.Tensor, device: torch.device, seconds: float
) -> tuple[torch.Tensor, list[float]]:
    """Loss of the last step, whose gradients are left, and the seconds of each."""
    times: list[float] = []
    while True:
        side.model.zero_grad(set_to_none=True)
        loss, took = timed(lambda: side.run(ids), device)
        times.append(took)
        if sum(times) >= seconds:
            return loss, times


def token_ids(side: Side, tokens: int, device: torch.device) -> torch.Tensor:
    """Random token ids [1, tokens], the same on every side."""
    generator = torch.Generator().manual_seed(tokens)
    size = (1, tokens)
    return torch.randint(0, side.model.config.vocab_size, size, generator=generator).to(device)


def clear(side: Side) -> None:
    """Drop gradients, and give back memory that nothing uses."""
    side.model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _grad_norm(model: torch.nn.Module) -> float:
    # Summed in fp64 as it is read: a copy in fp64 might not fit.
    norms = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return float(torch.stack(norms).norm())
