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
from oomb.chunking import Chunk, Read


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
        parts = []
        for rows, at, read in _spans(call.chunk):
            q_here, *kv_here = (x[rows, :, at] for x in (q, k, v))
            own = Mask(causal=True, window=call.window)
            part = self.forward(q_here, *kv_here, call.scale, own)
            segments = _visible_segments(call, read)
            for number, (mask, segment) in enumerate(segments, 1):
                new = self.forward(q_here, segment.k, segment.v, call.scale, mask)
                part = merge(part, new, q.dtype if number == len(segments) else wide)
            parts.append((rows, at, *part))
        return _assemble(parts, q, wide)

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
        grad_k, grad_v = call.own_page_gradients(k, v)
        grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
        parts = []
        for rows, at, read in _spans(call.chunk):
            grad_here, q_here, *kv_here, out_here, lse_here = (
                x[rows, :, at] for x in (grad_out, q, k, v, out, lse)
            )
            own = Mask(causal=True, window=call.window)
            grad_q, *terms = self.backward(
                grad_here, q_here, *kv_here, out_here, lse_here, call.scale, own
            )
            for total, term in zip((grad_k, grad_v), terms, strict=True):
                total[rows, :, at].add_(term)
            segments = _visible_segments(call, read)
            if len(segments) > 1:  # two terms lose nothing when their sum is rounded at once
                grad_q = grad_q.to(grad_k.dtype)
            for mask, segment in segments:
                term, *terms = self.backward(
                    grad_here, q_here, segment.k, segment.v, out_here, lse_here, call.scale, mask
                )
                grad_q = grad_q.add_(term)
                segment.grad_k.add_(terms[0])
                segment.grad_v.add_(terms[1])
            parts.append((rows, at, grad_q))
        return _assemble_gradient(parts, q), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _spans(chunk: Chunk) -> Iterator[tuple[slice, slice, Read | None]]:
    """(rows, tokens, read) of every causal square; rows that read history come one by one."""
    reads = {read.row: read for read in chunk.reads}
    for own in chunk.own:
        here = {row: reads.get(row) for row in range(*own.rows)}
        here = {row: read for row, read in here.items() if read and read.start == own.start}
        at = slice(own.start, own.stop)
        if not here:
            yield slice(*own.rows), at, None
            continue
        for row in range(*own.rows):
            yield slice(row, row + 1), at, here.get(row)


def _visible_segments(call: LayerCall, read: Read | None) -> list[tuple[Mask, Segment]]:
    """Every segment of history that some query of a read sees, and its mask."""
    if read is None:
        return []
    found = []
    for segment in call.history.segments(call.layer, read.row, read.first, read.last):
        mask = Mask(offset=read.last - segment.first, window=call.window)
        if not mask.hides_all(segment.k.shape[2]):
            found.append((mask, segment))
    return found


def _assemble(
    parts: list[tuple[slice, slice, torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, N, H, D] in the dtype of q and lse [B, H, N]; 0 and -inf where no part is."""
    if len(parts) == 1 and parts[0][2].shape == q.shape:
        _, _, out, lse = parts[0]
        return out.transpose(1, 2).to(q.dtype), lse.to(wide)
    rows, heads, tokens, dim = q.shape
    whole = q.new_zeros(rows, tokens, heads, dim)
    whole_lse = q.new_full((rows, heads, tokens), float("-inf"), dtype=wide)
    for at_rows, at, out, lse in parts:
        whole[at_rows, at] = out.transpose(1, 2).to(q.dtype)
        whole_lse[at_rows, :, at] = lse.to(wide)
    return whole, whole_lse


def _assemble_gradient(
    parts: list[tuple[slice, slice, torch.Tensor]], q: torch.Tensor
) -> torch.Tensor:
    """grad_q in the shape and dtype of q; 0 where no part is."""
    if len(parts) == 1 and parts[0][2].shape == q.shape:
        return parts[0][2].to(q.dtype)
    whole = torch.zeros_like(q)
    for rows, at, grad in parts:
        whole[rows, :, at] = grad.to(q.dtype)
    return whole
