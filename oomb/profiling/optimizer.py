"""Optimizer steps as stages: they come between the engine's steps, where nothing else listens."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from oomb.profiling.place import Place, at_place
from oomb.profiling.stage import Stage, stage
from oomb.profiling.timeline import Timeline


class OptimizerStages:
    """Watches optimizers, each step of which belongs to the engine's step before it.

    Attributes:
        timeline: of the engine's last step; None where nobody listens.
        optimizers: those that are watched.
    """

    def __init__(self) -> None:
        self.timeline: Timeline | None = None
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._open: Stage | None = None

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Show its steps from now on; watching twice is the same as once."""
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._begin))
            self._hooks.append(optimizer.register_step_post_hook(self._end))

    def close(self) -> None:
        """Watch nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.optimizers.clear()
        self.timeline = None

    def _begin(self, *_: Any) -> None:
        if self._open is not None:  # that step raised
            self._open.leave()
        if self.timeline is not None:
            self.timeline.clock.anchor()
        with at_place(Place(timeline=self.timeline)):
            self._open = stage("optimizer")
        self._open.__enter__()

    def _end(self, *_: Any) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if self.timeline is not None:
            self.timeline.close()
