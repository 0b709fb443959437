"""One layer's attention over one chunk, as autograd sees it.

Forward merges the own chunk (causal) with all of history. Backward adds this chunk's term to the
page gradients of earlier chunks in place, outside autograd, and starts the gradients of its own K
and V from its own pages, where every later chunk has already left its term.
"""

from __future__ import annotations

from typing import Any

import torch

from oomb.attention.api import LayerCall
from oomb.attention.sink import sink_gradient
from oomb.profiling.stage import stage


def attend(
    call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a chunk over its own tokens and history.

    Args:
        call: layer, chunk and history.
        q: [B, H, N, D].
        k: [B, G, N, D].
        v: [B, G, N, D].

    Returns:
        out [B, N, H, D] in the dtype of q, and lse [B, H, N] in fp32 (fp64 for fp64). Rows beyond
        their length have out 0 and lse -inf, or their head's sink.
    """
    with stage("attention", call.layer):
        return call.backend.attend(call, q, k, v)


def attend_backward(
    call: LayerCall,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a chunk's q, k and v; history's page gradients grow in place.

    Args:
        call: layer, chunk and history.
        grad_out: [B, N, H, D].
        q: [B, H, N, D].
        k: [B, G, N, D].
        v: [B, G, N, D].
        out: [B, N, H, D], over all keys.
        lse: [B, H, N], over all keys.

    Returns:
        Gradients of q, k and v in their shapes; those of k and v include what later chunks left
        in this chunk's pages.
    """
    with stage("attention", call.layer):
        return call.backend.attend_backward(call, grad_out, q, k, v, out, lse)


class ChunkAttention(torch.autograd.Function):
    """`attend` and `attend_backward` as one differentiable operator."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: LayerCall,
        sink: torch.Tensor | None = None,
    ):
        """Returns (out [B, N, H, D], lse [B, H, N]); lse is not differentiable.

        `sink` is the call's own, given where autograd shall see it.
        """
        out, lse = call.kept if call.kept is not None else attend(call, q, k, v)
        call.kept = None
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, _grad_lse: torch.Tensor):
        """Gradients of q, k, v and the sink."""
        call, saved, grad_sink = ctx.call, ctx.saved_tensors, None  # unpacked once: checkpoints
        grads = attend_backward(call, grad_out, *saved)
        if any(ctx.needs_input_grad[4:]):
            grad_sink = sink_gradient(call.sink, grad_out, *saved[3:])
        return *grads, None, grad_sink
