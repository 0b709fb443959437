"""Attention a segment at a time, for kernels that know one part of the keys.

The own chunk (causal) is merged with every segment of history that some query sees; the backward
visits the same parts, each with the output and log-sum-exp over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oomb.attention.api import LayerCall, Mask
from oomb.attention.merge import merge
from oomb.cache import Segment
from oomb.chunking import Read


class Segmentwise:
    """A backend made of `forward` and `backward` over one part."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, N, D], k and v [B, G, S, D] -> out [B, H, N, D], lse [B, H, N]."""
        raise NotImplementedError

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: Mask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v from this part, given out and lse over *all* parts."""
        raise NotImplementedError

    def attend(
        self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `oomb.attention.attend`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=wide)
        out = state.transpose(1, 2)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float64)
        for own in call.chunk.own:
            rows, at = slice(*own.rows), slice(own.start, own.stop)
            here = [x[rows, :, at] for x in (q, k, v)]
            part = self.forward(*here, call.scale, Mask(causal=True, window=call.window))
            out[rows, :, at].copy_(part[0])  # the own chunk comes first: nothing to merge with
            lse[rows, :, at].copy_(part[1])
        for read, mask, segment in _visible_history(call):
            rows, at = slice(read.row, read.row + 1), slice(read.start, read.stop)
            part = self.forward(q[rows, :, at], segment.k, segment.v, call.scale, mask)
            merge(out[rows, :, at], lse[rows, :, at], *part)
        return state.to(q.dtype), lse.to(wide)

    def attend_backward(
        self,
        call: LayerCall,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `oomb.attention.attend_backward`."""
        grad_q = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        grad_k, grad_v = call.own_page_gradients(k, v)
        grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
        for own in call.chunk.own:
            rows, at = slice(*own.rows), slice(own.start, own.stop)
            here = [x[rows, :, at] for x in (grad_out, q, k, v, out, lse)]
            grads = self.backward(*here, call.scale, Mask(causal=True, window=call.window))
            for total, term in zip((grad_q, grad_k, grad_v), grads, strict=True):
                total[rows, :, at].add_(term)
        for read, mask, segment in _visible_history(call):
            rows, at = slice(read.row, read.row + 1), slice(read.start, read.stop)
            grad_here, q_here, out_here, lse_here = (
                x[rows, :, at] for x in (grad_out, q, out, lse)
            )
            terms = self.backward(
                grad_here, q_here, segment.k, segment.v, out_here, lse_here, call.scale, mask
            )
            grad_q[rows, :, at].add_(terms[0])
            segment.grad_k.add_(terms[1])
            segment.grad_v.add_(terms[2])
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _visible_history(call: LayerCall) -> Iterator[tuple[Read, Mask, Segment]]:
    """(read, mask, segment) for every history segment that some query of the chunk sees."""
    for read in call.chunk.reads:
        for segment in call.history.segments(call.layer, read.row, read.first, read.last):
            mask = Mask(offset=read.last - segment.first, window=call.window)
            if not mask.hides_all(segment.k.shape[2]):
                yield read, mask, segment
