"""The fill's last layer ends where its K and V are in pages: nothing reads what it computes after.

Every layer before needs its whole output, for the next one's K and V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oomb.randomness import RandomState


class FillEnding:
    """Watches one chunk of the fill, and lets the last layer of the others end early if it may.

    It may where the layer returns one tensor shaped like the one it gets, and no random numbers are
    drawn, of which the layer might have drawn some.

    Args:
        wanted: whether to end early at all.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._may = False
        self._alike = False

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The last decoder layer's forward, to be used in the fill."""

        def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            try:
                output = forward(hidden, *args, **kwargs)
            except _PagesWritten:
                return hidden
            self._alike = isinstance(output, torch.Tensor) and output.shape == hidden.shape
            return output

        return run

    def chunk_done(self, before: RandomState, after: RandomState) -> None:
        """A chunk of the fill has run; its random states tell whether it drew any numbers."""
        self._may = self._wanted and self._alike and before == after

    @property
    def comes(self) -> bool:
        """Whether the chunk at work ends early."""
        return self._may

    def end(self) -> None:
        """Leave the last layer."""
        raise _PagesWritten


class _PagesWritten(Exception):
    """Carries control from the last layer's attention to the end of the layer."""
