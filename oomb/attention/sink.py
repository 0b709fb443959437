"""Learnable sinks: one score per head that takes part in the softmax and brings no value.

A head's sink is where its attention state begins: output 0 and log-sum-exp equal to the sink, as if
a key of that score and of value 0 had been seen. What is merged later only shrinks its share.
"""

from __future__ import annotations

import torch

from oomb.attention.merge import Part


def first_part(sink: torch.Tensor, q: torch.Tensor) -> Part:
    """The state before any key, as a part to merge others with; it takes no memory.

    Args:
        sink: [H].
        q: [B, H, N, D].

    Returns:
        Output [B, H, N, D] of zeros in the dtype of q, and log-sum-exp [B, H, N].
    """
    return q.new_zeros(q.shape[-1]).expand(q.shape), sink.detach()[:, None].expand(q.shape[:3])


def first_lse(sink: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp before any key: the sink, or -inf without one.

    Args:
        sink: [H], or None.
        q: [B, H, N, D].

    Returns:
        [B, H, N] in fp32 (fp64 for fp64), in memory of its own.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
    return lse if sink is None else lse.copy_(sink.detach()[:, None])


def sink_gradient(
    sink: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """Gradient of a sink: minus its share of each softmax times out . grad_out, summed.

    Args:
        sink: [H].
        grad_out: [B, N, H, D].
        out: [B, N, H, D], over the sink and all keys.
        lse: [B, H, N], likewise.

    Returns:
        [H] in the dtype of lse.
    """
    share = torch.exp(sink[:, None] - lse)
    # A sink of -inf is none, and a query that sees no key has nothing else: -inf - -inf.
    share = share.masked_fill(lse == float("-inf"), 0.0)
    delta = (out.to(lse.dtype) * grad_out).sum(-1)
    return -(share * delta.transpose(1, 2)).sum((0, 2))
