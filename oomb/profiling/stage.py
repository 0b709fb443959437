"""`stage()`: the one place where a part of a step shows itself to every profiler.

A stage opens an NVTX range (domain `oomb`, for Nsight), a `record_function` span (for
torch.profiler) and, while an engine records, a `Span` that becomes an event of its recorder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch

from oomb.profiling.event import KINDS
from oomb.profiling.place import Place, here
from oomb.profiling.span import Span

try:  # the package is optional: without it Nsight shows kernels but no stages
    import nvtx

    _NVTX = nvtx.get_domain("oomb")
    _NAMES = {kind: _NVTX.get_event_attributes(kind) for kind in KINDS}
except ImportError:
    _NVTX = None


class Stage:
    """A context manager around a part of the step.

    Args:
        span: when and where; `as` gives it.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self._profiled: torch.profiler.record_function | None = None

    def __enter__(self) -> Span:
        if _NVTX is not None:
            _NVTX.push_range(_NAMES[self.span.kind])
        if torch.autograd._profiler_enabled():  # asking is far cheaper than a span nobody sees
            self._profiled = torch.profiler.record_function(f"oomb::{self.span.kind}")
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
        self.leave()

    def leave(self) -> None:
        """End it for the profilers alone: the recorder gets no event of a stage that broke off."""
        if self._profiled is not None:
            self._profiled.__exit__(None, None, None)
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


@contextmanager
def halting_stage(kind: str, place: Place) -> Iterator[None]:
    """Mark a part in which the caller may halt, for as long as it likes, and go on elsewhere.

    What a thread has open must close in order and on that thread, so Nsight gets a range of the
    whole process, and torch.profiler nothing. A part that is given up sends no event.

    Args:
        kind: one of `KINDS`.
        place: where it belongs.

    Yields:
        Nothing.
    """
    span = Span(place, kind)
    opened = None if _NVTX is None else _NVTX.start_range(_NAMES[kind])
    span.begin()
    try:
        yield
    finally:
        if _NVTX is not None:
            _NVTX.end_range(opened)
    span.end()
