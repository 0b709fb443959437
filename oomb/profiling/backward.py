"""Stages of a module's backward: what autograd runs between its output's and its input's gradient.

Nothing is added to the graph. Hooks on the two tensors open and close the stage on the thread that
autograd runs backward on, since what a thread opens it must close itself. Where a module's input
needs no gradient, nothing passes by at its end: its stage ends where the next one that does not
lie inside it begins, or with the whole backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from oomb.profiling.span import backward_pass
from oomb.profiling.stage import Stage, stage

DEPTHS = {"layer": 0, "projection": 1, "mlp": 1}
"""A stage lies inside those of smaller depth, and ends all others that are open."""


class _Opened(threading.local):
    """This thread's open stages, outermost first, and the backward pass that they belong to."""

    def __init__(self) -> None:
        self.stages: list[tuple[int, Stage]] = []
        self.during: int | None = None

    def close_from(self, depth: int) -> None:
        """End what is open at this depth and deeper."""
        while self.stages and self.stages[-1][0] >= depth:
            self.stages.pop()[1].__exit__(None, None, None)

    def close(self) -> None:
        """End everything; the backward pass is over."""
        self.close_from(0)
        self.during = None

    def belong_to(self, now: int) -> None:
        """Forget what a backward pass that raised left open, and have this one close up at last."""
        if self.during != now:
            while self.stages:
                self.stages.pop()[1].leave()
            self.during = now
            torch.autograd.Variable._execution_engine.queue_callback(self.close)


_OPENED = _Opened()


def show_backward(
    kind: str,
    layer: int,
    given: Iterable[Any],
    result: Any,
    first: Callable[[], object] | None = None,
) -> None:
    """Have a module's backward show itself as a stage; a no-op where there will be none.

    Args:
        kind: `layer`, `projection` or `mlp`.
        layer: layer number.
        given: the module's arguments.
        result: what it returned: a tensor, or several.
        first: called at the beginning of the stage.
    """
    output = _differentiable(result if isinstance(result, tuple | list) else (result,))
    if output is None or backward_pass() is not None:  # the second forward has no backward
        return
    shown = _Backward(kind, layer, first)
    output.register_hook(shown.begin)
    came_in = _differentiable(given)
    if came_in is not None:
        came_in.register_hook(shown.end)


class _Backward:
    """One module call's stage, between two hooks."""

    def __init__(self, kind: str, layer: int, first: Callable[[], object] | None) -> None:
        self._kind, self._layer, self._first = kind, layer, first
        self._stage: Stage | None = None

    def begin(self, _gradient: torch.Tensor) -> None:
        depth = DEPTHS[self._kind]
        _OPENED.belong_to(backward_pass())
        _OPENED.close_from(depth)
        self._stage = stage(self._kind, self._layer)
        self._stage.__enter__()
        _OPENED.stages.append((depth, self._stage))
        if self._first is not None:
            self._first()

    def end(self, _gradient: torch.Tensor) -> None:
        depth = DEPTHS[self._kind]
        if any(opened is self._stage for _, opened in _OPENED.stages):
            _OPENED.close_from(depth)


def _differentiable(values: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor that gets a gradient."""
    return next((x for x in values if isinstance(x, torch.Tensor) and x.requires_grad), None)
