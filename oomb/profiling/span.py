"""A stage from its announcement to its end, marked on whichever clock runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oomb.profiling.clock import Mark

if TYPE_CHECKING:
    from oomb.profiling.place import Place

NO_BACKWARD = -1  # id of the running backward pass, where there is none


def backward_pass() -> int | None:
    """A number for the backward pass that this thread is part of; None outside of one."""
    now = torch._C._current_graph_task_id()
    return None if now == NO_BACKWARD else now


class Span:
    """A part of a step.

    Whose it is gets settled at once; it may begin later and on another thread. Where nobody
    listens, no time is marked.

    Args:
        place: where the step stands.
        kind: one of `KINDS`.
        layer: layer number, or None.
        nbytes: bytes that a copy moves.
        waits_on: copies that a wait waits for.

    Attributes:
        begun, ended: marks of the timeline's clock, None until then.
        enqueue_ns: host time of the beginning, nanoseconds.
        number: no other span of the step has it.
        backward: whether it belongs to a backward pass.
    """

    def __init__(
        self,
        place: Place,
        kind: str,
        layer: int | None = None,
        *,
        nbytes: int | None = None,
        waits_on: Sequence[Span] = (),
    ) -> None:
        self.place, self.kind, self.layer = place, kind, layer
        self.nbytes, self.waits_on = nbytes, waits_on
        self.backward = backward_pass() is not None
        self.number = place.timeline.number() if place.timeline is not None else None
        self.enqueue_ns: int | None = None
        self.begun: Mark | None = None
        self.ended: Mark | None = None

    def begin(self) -> None:
        """What the current stream is given from now on is part of it."""
        if self.place.timeline is not None:
            self.enqueue_ns = time.perf_counter_ns()
            self.begun = self.place.timeline.clock.mark()

    def end(self) -> None:
        """What the current stream was given up to now was part of it."""
        if self.place.timeline is not None:
            self.ended = self.place.timeline.clock.mark()
            self.place.timeline.add(self)
