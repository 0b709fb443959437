"""Where a step stands, and who listens: what every stage opened by it carries along."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oomb.profiling.timeline import Timeline


@dataclass(frozen=True)
class Place:
    """A chunk in a phase.

    Attributes:
        phase: `fill`, `sweep` or `evaluate`; None outside of a step.
        chunk: chunk number; None for what belongs to a whole phase.
        timeline: takes the stages; None if nobody listens.
    """

    phase: str | None = None
    chunk: int | None = None
    timeline: Timeline | None = None


# A module global rather than a thread's, since autograd runs backward on threads of its own.
_here = Place()


def here() -> Place:
    """Where the step that is at work stands; an empty place outside of any."""
    return _here


@contextmanager
def at_place(place: Place) -> Iterator[None]:
    """Stages opened inside, on any thread, belong there."""
    global _here
    before, _here = _here, place
    try:
        yield
    finally:
        _here = before
