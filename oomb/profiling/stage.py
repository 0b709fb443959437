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

NO_BACKWARD = -1  # id of the running backward pass, where there is none
KINDS = (
    *("phase", "chunk", "layer"),  # containers
    *("projection", "selection", "attention", "mlp", "loss"),
    *("copy_in", "copy_out", "wait", "optimizer"),
)


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
        step: number of the engine's step, from 0; None outside of a step.
    """

    kind: str
    phase: str | None
    chunk: int | None
    layer: int | None
    t_ns: int
    dur_ns: int
    backward: bool
    step: int | None = None


OnEvent = Callable[[Event], None] | None


@dataclass(frozen=True)
class Place:
    """Where a step stands, and who listens."""

    step: int | None = None
    phase: str | None = None
    chunk: int | None = None
    on_event: OnEvent = None

    def emit(self, kind: str, layer: int | None, start_ns: int, backward: bool = False) -> None:
        """Send an event that began at `start_ns` and ends now."""
        if self.on_event is not None:
            duration = time.perf_counter_ns() - start_ns
            self.on_event(
                Event(kind, self.phase, self.chunk, layer, start_ns, duration, backward, self.step)
            )


# A module global rather than a thread's, since autograd runs backward on threads of its own.
_place = Place()


@contextmanager
def place(
    phase: str, chunk: int | None, on_event: OnEvent, step: int | None = None
) -> Iterator[None]:
    """Stages opened inside, on any thread, belong to this phase and chunk of this step."""
    global _place
    before, _place = _place, Place(step, phase, chunk, on_event)
    try:
        yield
    finally:
        _place = before


@contextmanager
def stage(kind: str, layer: int | None = None) -> Iterator[None]:
    """Mark a part of the step.

    Args:
        kind: one of `KINDS`.
        layer: layer number, for stages that belong to one.

    Raises:
        ValueError: the kind is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    here, start = _place, time.perf_counter_ns()
    if _NVTX is not None:
        _NVTX.push_range(_NVTX.get_event_attributes(kind))
    try:
        with torch.profiler.record_function(f"oomb::{kind}"):
            yield
    finally:
        if _NVTX is not None:
            _NVTX.pop_range()
        here.emit(kind, layer, start, backward=torch._C._current_graph_task_id() != NO_BACKWARD)
