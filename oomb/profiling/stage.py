"""`stage()`: the one place where a part of a step shows itself to every profiler.

A stage opens an NVTX range (domain `oomb`, for Nsight), a `record_function` span (for
torch.profiler) and, while an engine records, sends an `Event` to its recorder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

try:  # the package is optional: without it Nsight shows kernels but no stages
    import nvtx

    _NVTX = nvtx.get_domain("oomb")
except ImportError:
    _NVTX = None

CONTAINERS = ("phase", "chunk", "layer")
KINDS = (*CONTAINERS, "projection", "selection", "attention", "mlp", "loss", "copy_in", "copy_out")
KINDS += ("wait", "optimizer")


@dataclass(frozen=True)
class Event:
    """One finished stage.

    Attributes:
        kind: one of `KINDS`.
        phase: `fill`, `sweep` or `evaluate`; None outside of a step.
        chunk: chunk number, or None.
        layer: layer number, or None.
        t_ns: host time of the start, nanoseconds of `time.perf_counter_ns`.
        dur_ns: host time from start to end, nanoseconds. On a GPU the host runs ahead of the
            kernels, so this is launch time.
        backward: whether the stage ran inside a backward pass.
    """

    kind: str
    phase: str | None
    chunk: int | None
    layer: int | None
    t_ns: int
    dur_ns: int
    backward: bool


class _Place:
    """Where the step stands. A module global, since autograd runs backward on other threads."""

    phase: str | None = None
    chunk: int | None = None
    on_event: Callable[[Event], None] | None = None


@contextmanager
def place(
    phase: str, chunk: int | None, on_event: Callable[[Event], None] | None
) -> Iterator[None]:
    """Tell stages opened inside, on any thread, which phase and chunk they belong to."""
    before = (_Place.phase, _Place.chunk, _Place.on_event)
    _Place.phase, _Place.chunk, _Place.on_event = phase, chunk, on_event
    try:
        yield
    finally:
        _Place.phase, _Place.chunk, _Place.on_event = before


@contextmanager
def stage(kind: str, layer: int | None = None, *, backward: bool = False) -> Iterator[None]:
    """Mark a part of the step.

    Args:
        kind: one of `KINDS`.
        layer: layer number, for stages that belong to one.
        backward: whether this runs inside a backward pass.

    Raises:
        ValueError: the kind is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    on_event, start = _Place.on_event, time.perf_counter_ns()
    if _NVTX is not None:
        attributes = _NVTX.get_event_attributes(kind)
        _NVTX.push_range(attributes)
    try:
        with torch.profiler.record_function(f"oomb::{kind}"):
            yield
    finally:
        if _NVTX is not None:
            _NVTX.pop_range()
        if on_event is not None:
            duration = time.perf_counter_ns() - start
            on_event(Event(kind, _Place.phase, _Place.chunk, layer, start, duration, backward))
