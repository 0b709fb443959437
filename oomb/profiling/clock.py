"""Clocks that mark moments without waiting for them.

A moment of the host is known at once. A moment of a GPU's stream is known once the stream gets
there, as a distance to another one; distances come as fp32 milliseconds, so far ones are coarse.
Each mark is therefore measured from the last *anchor*, and the anchors from one another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Mark = Any
"""A moment: nanoseconds on the host's clock, `CudaMark` on a GPU's."""


class Clock(Protocol):
    """Marks moments.

    Attributes:
        instant: whether every mark is known at once.
    """

    instant: bool

    def anchor(self) -> None:
        """Marks that come next are measured from this moment; to be called every few seconds."""

    def mark(self) -> Mark:
        """The moment at which what was launched so far, on the current stream, is done."""

    def reached(self, mark: Mark) -> bool:
        """Whether its time is known."""

    def wait(self, mark: Mark) -> None:
        """Until its time is known."""

    def nanoseconds(self, mark: Mark) -> int:
        """Its time, on the scale of `time.perf_counter_ns`."""


class HostClock:
    """Moments of the host."""

    instant = True

    def anchor(self) -> None:
        """See `Clock`."""

    def mark(self) -> int:
        """See `Clock`."""
        return time.perf_counter_ns()

    def reached(self, mark: int) -> bool:
        """See `Clock`."""
        return True

    def wait(self, mark: int) -> None:
        """See `Clock`."""

    def nanoseconds(self, mark: int) -> int:
        """See `Clock`."""
        return mark


class Anchor:
    """A moment on the compute stream that others are measured from.

    Args:
        event: timing event, recorded.
        before: the anchor before it, or its nanoseconds if it is the first.
    """

    def __init__(self, event: torch.cuda.Event, before: Anchor | int) -> None:
        self.event = event
        self._before = before

    def nanoseconds(self) -> int:
        """Sum of the distances from the first anchor to this one; all must have been reached."""
        unknown, at = [], self
        while isinstance(at._before, Anchor):
            unknown.append(at)
            at = at._before
        for anchor in reversed(unknown):
            before = anchor._before
            anchor._before = before._before + _distance(before.event, anchor.event)
        return self._before


@dataclass(frozen=True)
class CudaMark:
    """A timing event, and the anchor that it is measured from."""

    event: torch.cuda.Event
    anchor: Anchor


class CudaClock:
    """Moments of a GPU's streams. Waits, once, until the GPU is idle.

    Args:
        device: the GPU.
    """

    instant = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # an idle GPU reaches a mark as soon as it is made
        event = self._record()
        event.synchronize()
        self._anchor = Anchor(event, time.perf_counter_ns())

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def anchor(self) -> None:
        """See `Clock`."""
        self._anchor = Anchor(self._record(), self._anchor)

    def mark(self) -> CudaMark:
        """See `Clock`."""
        return CudaMark(self._record(), self._anchor)

    def reached(self, mark: CudaMark) -> bool:
        """See `Clock`. A copy stream may be ahead of the anchor."""
        return mark.event.query() and mark.anchor.event.query()

    def wait(self, mark: CudaMark) -> None:
        """See `Clock`."""
        mark.event.synchronize()
        mark.anchor.event.synchronize()

    def nanoseconds(self, mark: CudaMark) -> int:
        """See `Clock`."""
        return mark.anchor.nanoseconds() + _distance(mark.anchor.event, mark.event)


def _distance(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(begin.elapsed_time(end) * 1e6)


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
