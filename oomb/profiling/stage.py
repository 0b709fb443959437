"""`stage()`: the one place where a part of a step shows itself to every profiler.

A stage opens an NVTX range (domain `oomb`, for Nsight), a `record_function` span (for
torch.profiler) and, while an engine records, a `Span` that becomes an event of its recorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from oomb.profiling.event import KINDS
from oomb.profiling.place import here
from oomb.profiling.span import Span

try:  # the package is optional: without it Nsight shows kernels but no stages
    import nvtx

    _NVTX = nvtx.get_domain("oomb")
except ImportError:
    _NVTX = None


class Stage:
    """A context manager around a part of the step.

    Args:
        span: when and where; `as` gives it.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self._profiled = torch.profiler.record_function(f"oomb::{span.kind}")

    def __enter__(self) -> Span:
        if _NVTX is not None:
            _NVTX.push_range(_NVTX.get_event_attributes(self.span.kind))
        self._profiled.__enter__()
        self.span.begin()
        return self.span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.span.end()
        self._profiled.__exit__(kind, error, traceback)
        if _NVTX is not None:
            _NVTX.pop_range()


def stage(
    kind: str,
    layer: int | None = None,
    *,
    nbytes: int | None = None,
    waits_on: Sequence[Span] = (),
) -> Stage:
    """Mark a part of the step: `with stage("mlp", layer): ...`.

    It belongs to the chunk at which it is made, even where it is entered later, on another thread.

    Args:
        kind: one of `KINDS`.
        layer: layer number, for stages that belong to one.
        nbytes: bytes that a copy moves.
        waits_on: copies that a wait waits for.

    Returns:
        The context manager.

    Raises:
        ValueError: the kind is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return Stage(Span(here(), kind, layer, nbytes=nbytes, waits_on=waits_on))
