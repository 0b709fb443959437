"""Exact attention as a sum of parts.

Softmax attention over any split of the keys is the weighted mean of the parts' outputs, weighted
by exp(log-sum-exp); its backward is a sum over the parts once the final output and log-sum-exp are
known. So history may come in any number of segments, from anywhere, in any order.

Shapes: B rows, H query heads, G key/value heads, N queries, S keys, D head dim. The state is
out [B, N, H, D], normalised, in fp32 (fp64 for fp64 models), and lse [B, H, N], natural log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees.

    Attributes:
        offset: position of the first query minus position of the first key.
        causal: a query sees no key behind its own position.
        window: a query sees only keys less than this many positions back; None sees all.
    """

    offset: int = 0
    causal: bool = False
    window: int | None = None

    def hides_any(self, queries: int, keys: int) -> bool:
        """Whether some query misses some key: if not, the mask need not be applied."""
        return self.hides_future(keys) or self.hides_past(queries)

    def hides_future(self, keys: int) -> bool:
        """Whether the first query misses a key ahead of it."""
        return self.causal and self.offset < keys - 1

    def hides_past(self, queries: int) -> bool:
        """Whether the last query misses the first key."""
        return self.window is not None and self.offset + queries - 1 >= self.window

    def hides_all(self, keys: int) -> bool:
        """Whether even the first query has left the last key behind."""
        return self.window is not None and self.offset - (keys - 1) >= self.window


class Backend(Protocol):
    """One implementation of attention over one part of the keys."""

    name: str

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, N, D], k and v [B, G, S, D] -> out [B, H, N, D], lse [B, H, N]."""

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


def merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add a part to the state in place.

    Args:
        out: state [B, H, N, D] (a view is fine).
        lse: state [B, H, N] in fp64, since every merge rounds it once and the output is
            normalised by it; -inf where nothing was added yet.
        part_out: the part's output [B, H, N, D], any float dtype.
        part_lse: the part's log-sum-exp [B, H, N]; -inf where it holds no visible key.
    """
    total = torch.logaddexp(lse, part_lse)
    # A query that has seen nothing yet has total = -inf; exp(-inf - 0) is the 0 it should weigh.
    safe = total.masked_fill(total == float("-inf"), 0.0)
    out.mul_(torch.exp(lse - safe).to(out.dtype)[..., None])
    out.addcmul_(part_out.to(out.dtype), torch.exp(part_lse - safe).to(out.dtype)[..., None])
    lse.copy_(total)
