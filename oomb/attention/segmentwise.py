"""Attention a segment at a time, for kernels that know one part of the keys.

The own chunk (causal) is merged with every segment of history that some query sees, or with the
pages that its query page has chosen; the backward visits the same parts, each with the output and
log-sum-exp over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from oomb.attention.api import LayerCall, Mask
from oomb.attention.merge import merge
from oomb.attention.sink import first_lse, first_part
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
        parts = []
        for span in _spans(call):
            q_here, count = q[span.rows, :, span.at], _count(call, span)
            part = None if call.sink is None else first_part(call.sink, q_here)
            for number, (mask, source) in enumerate(_sources(call, span, k, v), 1):
                new = self.forward(q_here, source.k, source.v, call.scale, mask)
                dtype = q.dtype if number == count else wide
                part = new if part is None else merge(part, new, dtype)
            if part is not None:
                parts.append((span, *part))
        return _assemble(parts, q, call.sink)

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
        for span in _spans(call):
            grad_here, q_here, out_here, lse_here = (
                x[span.rows, :, span.at] for x in (grad_out, q, out, lse)
            )
            count, grad_q = _count(call, span), None
            for mask, source in _sources(call, span, k, v, grad_k, grad_v):
                new, *terms = self.backward(
                    grad_here, q_here, source.k, source.v, out_here, lse_here, call.scale, mask
                )
                source.grad_k.add_(terms[0])
                source.grad_v.add_(terms[1])
                if grad_q is not None:
                    grad_q.add_(new)
                else:  # two terms lose nothing when their sum is rounded at once
                    grad_q = new if count <= 2 else new.to(grad_k.dtype)
            if grad_q is not None:
                parts.append((span, grad_q))
        return _assemble_gradient(parts, q), grad_k.to(k.dtype), grad_v.to(v.dtype)


@dataclass(frozen=True)
class _Span:
    """Queries that see the same keys: those of one document in a chunk, or of one query page of it.

    Attributes:
        rows, at: which rows and tokens of the chunk; one row where history is read.
        own: tokens of the chunk that they see, each up to itself; None where they see none.
        read: the history that they see whole, or None.
        chosen: history, and which of its pages they see, int32 [kv heads or 1, K]; or None.
    """

    rows: slice
    at: slice
    own: slice | None
    read: Read | None = None
    chosen: tuple[Read, torch.Tensor] | None = None


def _spans(call: LayerCall) -> Iterator[_Span]:
    reads = {(read.row, read.start): read for read in call.chunk.reads}
    for own in call.chunk.own:
        at = slice(own.start, own.stop)
        here = [reads.pop((row, own.start), None) for row in range(*own.rows)]
        if not any(here):
            yield _Span(slice(*own.rows), at, at)
            continue
        for row, read in zip(range(*own.rows), here, strict=True):
            yield from _by_query_page(call, _Span(slice(row, row + 1), at, at, read))
    for (row, _), read in reads.items():
        at = slice(read.start, read.stop)
        yield from _by_query_page(call, _Span(slice(row, row + 1), at, None, read))


def _by_query_page(call: LayerCall, span: _Span) -> Iterator[_Span]:
    """A span cut into those whose queries have chosen the same pages; the span itself if none have.

    Tokens of history behind the last complete page could not be chosen: all see them.
    """
    read = span.read
    selection = None if read is None else call.selections.get(read)
    if read is None or selection is None:
        yield span
        return
    complete = read.first + selection.count * call.history.table.page_size
    rest = replace(read, first=complete) if complete < read.last else None
    starts = range(span.at.start, span.at.stop, selection.block)
    for start, pages in zip(starts, selection.pages.unbind(1), strict=True):
        at = slice(start, min(start + selection.block, span.at.stop))
        own = None if span.own is None else slice(span.own.start, at.stop)
        yield _Span(span.rows, at, own, rest, (read, pages))


def _count(call: LayerCall, span: _Span) -> int:
    """How many sources a span has."""
    segments = [] if span.read is None else call.history.table.seen(span.read, call.window)
    return (span.own is not None) + (span.chosen is not None) + len(segments)


def _sources(
    call: LayerCall,
    span: _Span,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_k: torch.Tensor | None = None,
    grad_v: torch.Tensor | None = None,
) -> Iterator[tuple[Mask, Segment]]:
    """Keys that some query of a span sees, and the mask over each: its own, then its history.

    A source is there until the next one is asked for.
    """
    gradients = grad_k is not None
    if span.own is not None:
        here = (x if x is None else x[span.rows, :, span.own] for x in (k, v, grad_k, grad_v))
        offset = span.at.start - span.own.start
        yield Mask(offset=offset, causal=True, window=call.window), Segment(0, *here)
    if span.chosen is not None:
        with call.history.gather(call.layer, *span.chosen, gradients=gradients) as segment:
            yield Mask(), segment
    if span.read is not None:
        first = span.read.last + span.at.start - span.read.start  # position of the first query
        for segment in call.history.seen(call.layer, span.read, call.window, gradients=gradients):
            yield Mask(offset=first - segment.first, window=call.window), segment


def _assemble(
    parts: list[tuple[_Span, torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, N, H, D] in the dtype of q and lse [B, H, N]; where no part is, as they begin."""
    if len(parts) == 1 and parts[0][1].shape == q.shape:
        _, out, lse = parts[0]
        return out.transpose(1, 2).to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))
    rows, heads, tokens, dim = q.shape
    whole = q.new_zeros(rows, tokens, heads, dim)
    whole_lse = first_lse(sink, q)
    for span, out, lse in parts:
        whole[span.rows, span.at] = out.transpose(1, 2).to(q.dtype)
        whole_lse[span.rows, :, span.at] = lse
    return whole, whole_lse


def _assemble_gradient(parts: list[tuple[_Span, torch.Tensor]], q: torch.Tensor) -> torch.Tensor:
    """grad_q in the shape and dtype of q; 0 where no part is."""
    if len(parts) == 1 and parts[0][1].shape == q.shape:
        return parts[0][1].to(q.dtype)
    whole = torch.zeros_like(q)
    for span, grad in parts:
        whole[span.rows, :, span.at] = grad.to(q.dtype)
    return whole
