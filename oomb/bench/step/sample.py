"""A step's time estimated from a few of its chunks, for tuning without a whole run.

History is random numbers, so that no chunk but the sampled ones is computed. Chunks differ in the
length of their history alone, and what they cost is linear in it: in between is interpolated.
"""

from __future__ import annotations

from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch

from oomb.bench.step.recorded import summary
from oomb.bench.step.sides import OurSide
from oomb.bench.timing import peak_gib, reset_peak, timed
from oomb.chunking import Chunk
from oomb.gradients import GradientLedger
from oomb.passes import Passes
from oomb.randomness import RandomState

REPEATS = 3
ESTIMATED = "estimated from sampled chunks"


def sample_length(side: OurSide, ids: torch.Tensor, *, record: bool = False) -> dict[str, Any]:
    """Time fill and sweep of the first, a middle and the last chunk.

    Args:
        side: holds the engine.
        ids: [1, N] on the model's device; N is a multiple of the chunk size.
        record: whether the timed chunks are recorded, which is part of their time.

    Returns:
        JSON-ready figures; `estimated` says that they are. The peak is that of the sampled chunks
        with every page held, but without what `keep_fill_outputs` would keep of the others.
        `recorded` is the summary of these chunks, every repeat of them.
    """
    # The parts of Engine.step that a whole step would go through.
    engine = side.engine
    batch, plan, attention = engine._prepare(ids, None, None, None, None, None)
    ledger = GradientLedger(engine._trained, engine.config.grad_dtype, restore=False)
    reset_peak(ids.device)
    with (
        side.recorded() if record else nullcontext() as recorder,
        engine._work(ledger),
        engine._passes(batch, plan, attention, step=0) as passes,
    ):
        _write_random_pages(passes, plan.chunks)
        filled = plan.chunks[:-1]
        fills = {c.index: _time(passes, passes.fill, c, ids.device) for c in _spread(filled)}
        passes.turn()
        sampled = reversed(_spread(plan.chunks))
        sweeps = {c.index: _time(passes, passes.sweep, c, ids.device) for c in sampled}
    seconds = total(fills, len(filled)) + total(sweeps, len(plan.chunks))
    sampled_seconds = (REPEATS + 1) * (sum(fills.values()) + sum(sweeps.values()))
    recorded = None if recorder is None else summary(recorder.recording(), sampled_seconds)
    return {
        "estimated": ESTIMATED,
        **({} if recorded is None else {"recorded": recorded}),
        "tokens_per_s": ids.shape[1] / seconds,
        "step_seconds": [seconds],
        "fill_seconds": fills,
        "sweep_seconds": sweeps,
        "peak_gib": peak_gib(ids.device),
        "host_gib": side.host_bytes() / 2**30,
        "loss": None,
        "grad_norm": None,
    }


def total(seconds: dict[int, float], count: int) -> float:
    """Seconds of `count` chunks, from those of some: what lies between is on straight lines."""
    if not seconds:
        return 0.0
    indices = sorted(seconds)
    return float(np.interp(range(count), indices, [seconds[i] for i in indices]).sum())


def _spread(chunks: tuple[Chunk, ...]) -> list[Chunk]:
    """First, middle and last, in order; fewer where there are no three."""
    last = len(chunks) - 1
    return [chunks[i] for i in sorted({0, last // 2, last})] if chunks else []


def _write_random_pages(passes: Passes, chunks: tuple[Chunk, ...]) -> None:
    for chunk in chunks:
        passes._hold_pages(chunk)
        for write in chunk.writes:
            for layer, facts in enumerate(passes._facts.layers):
                size = (facts.shape.heads, write.stop - write.start, facts.shape.dim)
                k, v = torch.randn((2, *size), dtype=facts.shape.dtype, device=passes._device)
                passes._history.write(layer, write.row, write.first, k, v)


def _time(passes: Passes, run: Any, chunk: Chunk, device: torch.device) -> float:
    """Median seconds of a chunk, after one run that warms up."""
    seconds = []
    for _ in range(REPEATS + 1):
        passes._hold_pages(chunk)  # a sweep has let them go
        passes._random = [RandomState.capture(device)] * len(passes._plan.chunks)
        seconds.append(timed(lambda: run(chunk), device)[1])
    return median(seconds[1:])
