"""One layer's attention over one chunk, as autograd sees it.

Forward merges the own chunk (causal) with every segment of history. Backward adds this chunk's
term to the page gradients of earlier chunks in place, outside autograd, and starts the gradients
of its own K and V from its own pages, where every later chunk has already left its term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oomb.attention.api import Backend, Mask, merge
from oomb.cache import History
from oomb.chunking import Chunk
from oomb.profiling.stage import stage


@dataclass
class LayerCall:
    """What one attention call needs beside q, k and v.

    Attributes:
        layer: layer number.
        scale: factor on q . k.
        window: the layer's sliding window in tokens, or None.
        chunk: the chunk being computed: its own pieces, reads and writes.
        history: pages of earlier chunks.
        backend: the attention implementation.
        kept: (out, lse) of the same call made before, to be used instead of computing them again.
    """

    layer: int
    scale: float
    window: int | None
    chunk: Chunk
    history: History
    backend: Backend
    kept: tuple[torch.Tensor, torch.Tensor] | None = None


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
        their length have out 0 and lse -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=wide)
    out = state.transpose(1, 2)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float64)
    with stage("attention", call.layer):
        for own in call.chunk.own:
            rows, at = slice(*own.rows), slice(own.start, own.stop)
            mask = Mask(causal=True, window=call.window)
            part = call.backend.forward(
                q[rows, :, at], k[rows, :, at], v[rows, :, at], call.scale, mask
            )
            out[rows, :, at].copy_(part[0])  # the own chunk comes first: nothing to merge with
            lse[rows, :, at].copy_(part[1])
        for read, mask, segment in _visible_history(call):
            rows, at = slice(read.row, read.row + 1), slice(read.start, read.stop)
            part = call.backend.forward(q[rows, :, at], segment.k, segment.v, call.scale, mask)
            merge(out[rows, :, at], lse[rows, :, at], *part)
    return state.to(q.dtype), lse.to(wide)


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
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q = torch.zeros_like(q, dtype=wide)
    grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
    with stage("attention", call.layer):
        for write in call.chunk.writes:
            own_k, own_v = (x[write.row, :, write.start : write.stop] for x in (grad_k, grad_v))
            for at, page in call.history.pieces(call.layer, write.row, write.first, write.last):
                own_k[:, at].copy_(page.grad_k[0])
                own_v[:, at].copy_(page.grad_v[0])
        for own in call.chunk.own:
            rows, at = slice(*own.rows), slice(own.start, own.stop)
            here = [x[rows, :, at] for x in (grad_out, q, k, v, out, lse)]
            grads = call.backend.backward(*here, call.scale, Mask(causal=True, window=call.window))
            for total, term in zip((grad_q, grad_k, grad_v), grads, strict=True):
                total[rows, :, at].add_(term)
        for read, mask, segment in _visible_history(call):
            rows, at = slice(read.row, read.row + 1), slice(read.start, read.stop)
            grad_here, q_here, out_here, lse_here = (
                x[rows, :, at] for x in (grad_out, q, out, lse)
            )
            terms = call.backend.backward(
                grad_here, q_here, segment.k, segment.v, out_here, lse_here, call.scale, mask
            )
            grad_q[rows, :, at].add_(terms[0])
            segment.grad_k.add_(terms[1])
            segment.grad_v.add_(terms[2])
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _visible_history(call: LayerCall):
    """(read, mask, segment) for every history segment that some query of the chunk sees."""
    for read in call.chunk.reads:
        for segment in call.history.segments(call.layer, read.row, read.first, read.last):
            mask = Mask(offset=read.last - segment.first, window=call.window)
            if not mask.hides_all(segment.k.shape[2]):
                yield read, mask, segment


class ChunkAttention(torch.autograd.Function):
    """`attend` and `attend_backward` as one differentiable operator."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall):
        """Returns (out [B, N, H, D], lse [B, H, N]); lse is not differentiable."""
        out, lse = call.kept if call.kept is not None else attend(call, q, k, v)
        call.kept = None
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, _grad_lse: torch.Tensor):
        """Gradients of q, k and v."""
        return *attend_backward(ctx.call, grad_out, *ctx.saved_tensors), None
