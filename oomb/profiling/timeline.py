"""A step's stages on their way to whoever listens.

A GPU is behind the host, so a stage's time is known later than its end is marked. Ended stages wait
in line, and those whose times are known are sent at chunk boundaries: nobody waits for the GPU but
the end of the step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from oomb.profiling.clock import Clock, HostClock, Mark
from oomb.profiling.event import Event
from oomb.profiling.span import Span


class Timeline:
    """Turns spans into events, in the order of their ends.

    Args:
        on_event: receives each event; called by one thread at a time.
        clock: marks begin and end; the host's by default.
        step: number of the step; None outside of one.
    """

    def __init__(
        self,
        on_event: Callable[[Event], None],
        clock: Clock | None = None,
        step: int | None = None,
    ) -> None:
        self.clock = clock or HostClock()
        self._on_event, self._step = on_event, step
        self._line: deque[Span] = deque()
        self._lock = threading.Lock()  # a simulated tier's copies end on threads of their own
        self._count = 0

    def number(self) -> int:
        """A number that no other span of the step has."""
        with self._lock:
            self._count += 1
            return self._count - 1

    def add(self, span: Span) -> None:
        """Take a span that has ended."""
        with self._lock:
            if self.clock.instant:
                self._on_event(self._event(span))
            else:
                self._line.append(span)

    def publish(self) -> None:
        """Send what is known by now, without waiting."""
        with self._lock:
            while self._line and all(map(self.clock.reached, _marks(self._line[0]))):
                self._on_event(self._event(self._line.popleft()))

    def close(self) -> None:
        """Send everything; waits until it is known."""
        with self._lock:
            while self._line:
                for mark in _marks(self._line[0]):
                    self.clock.wait(mark)
                self._on_event(self._event(self._line.popleft()))

    def _event(self, span: Span) -> Event:
        at = self.clock.nanoseconds
        start = at(span.begun)
        last = max(_arrivals(span), key=lambda copy: at(copy.ended), default=None)
        if span.waits_on:
            end = start if last is None else max(start, at(last.ended))
        else:
            end = at(span.ended)
        return Event(
            kind=span.kind,
            phase=span.place.phase,
            chunk=span.place.chunk,
            layer=span.layer,
            t_ns=start,
            dur_ns=end - start,
            backward=span.backward,
            step=self._step,
            enqueue_ns=span.enqueue_ns,
            number=span.number,
            nbytes=span.nbytes,
            waits_on=None if last is None else last.number,
        )


def _arrivals(span: Span) -> list[Span]:
    """Copies that a wait waited for; one that is not over was not waited for."""
    return [copy for copy in span.waits_on if copy.ended is not None]


def _marks(span: Span) -> list[Mark]:
    """What must be known. A wait ends with the last copy, so that marks of its own cost nothing."""
    return [span.begun, *([copy.ended for copy in _arrivals(span)] or [span.ended])]
