"""What a chunk keeps between its forward and its backward.

`keep` lets autograd keep everything. The other policies keep each layer's input and compute the
layer again when its backward comes; `selective` also keeps the attention output and its
log-sum-exp, so that attention, whose cost grows with the context, is never computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Kept = tuple[torch.Tensor, torch.Tensor]


class LayerReplay:
    """Tells a decoder layer's attention whether it runs for the first time or again."""

    def __init__(self, policy: str) -> None:
        self._keeps_attention = policy == "selective"
        self._again = False
        self._kept: list[Kept] = []
        self._trigger: Any = None

    def keep(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Remember an attention call's result, for the time the layer runs again."""
        if self._keeps_attention and not self._again:
            self._kept.append((out.detach(), lse))

    def take(self) -> Kept | None:
        """The result kept for this call, if the layer runs again and keeps any."""
        return self._kept.pop(0) if self._again and self._kept else None

    def run_again(self) -> None:
        """Have the layer run a second time now, not in the midst of its backward.

        Autograd would do so when it first needs what a part of the layer has not kept, which would
        count as that part's time.
        """
        trigger, self._trigger = self._trigger, None
        if trigger is not None:
            _ = trigger.saved_tensors

    def clear(self) -> None:
        """Drop what is kept, after a step that did not finish."""
        self._trigger = None
        self._kept.clear()
        self._again = False

    def set_trigger(self) -> None:
        """Save something at the layer's beginning; asking for it back runs the layer again."""
        trigger = _Trigger.apply(torch.zeros(0, device="cpu", requires_grad=True)).grad_fn
        if not self._again:
            self._trigger = trigger

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """Everything inside is the layer's second forward."""
        self._again = True
        try:
            yield
        finally:
            self._again = False


class _Trigger(torch.autograd.Function):
    """Saves what it is given, beside the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor whose `grad_fn` holds x."""
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> None:
        """Never runs: nothing is computed from the result."""
        return None


def checkpointed(forward: Callable[..., Any], replay: LayerReplay) -> Callable[..., Any]:
    """A decoder layer's forward that keeps its inputs only; a no-op where gradients are off."""

    def triggered(*args: Any, **kwargs: Any) -> Any:
        replay.set_trigger()
        return forward(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            triggered,
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), replay.running_again()),
            **kwargs,
        )

    return run
