"""Exact attention as a sum of parts.

Softmax attention over any split of the keys is the weighted mean of the parts' outputs, weighted
by exp(log-sum-exp); its backward is a sum over the parts once the final output and log-sum-exp are
known. So history may come in any number of segments, from anywhere, in any order.

Shapes: B rows, H query heads, G key/value heads, N queries, S keys, D head dim. The state is
out [B, N, H, D], normalised, in fp32 (fp64 for fp64 models), and lse [B, H, N], natural log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from oomb.cache import History
from oomb.chunking import Chunk
from oomb.sparse import Selections


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
        sink: [H], a score per head that joins each query's softmax and brings no value, or None.
        selections: pages that reads have chosen; others see all of their history.
    """

    layer: int
    scale: float
    window: int | None
    chunk: Chunk
    history: History
    backend: Backend
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    sink: torch.Tensor | None = None
    selections: Selections = field(default_factory=dict)

    def own_page_gradients(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What later chunks left in the own chunk's pages.

        Args:
            k: [B, G, N, D].
            v: [B, G, N, D].

        Returns:
            Gradients of k and v so far, in their shapes, token-major, in fp32 (fp64 for fp64);
            0 where a token has no page.
        """
        wide = torch.promote_types(k.dtype, torch.float32)
        grads = []
        for x in (k, v):
            rows, heads, tokens, dim = x.shape
            grads.append(x.new_zeros(rows, tokens, heads, dim, dtype=wide).transpose(1, 2))
        for write in self.chunk.writes:
            own_k, own_v = (g[write.row, :, write.start : write.stop] for g in grads)
            left = self.history.own_gradients(self.layer, write.row, write.first, write.last)
            for at, grad_k, grad_v in left:
                own_k[:, at].copy_(grad_k)
                own_v[:, at].copy_(grad_v)
        return grads[0], grads[1]


class Backend(Protocol):
    """One implementation of a chunk's attention over itself and its history."""

    name: str

    def attend(
        self, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, N, D], k and v [B, G, N, D] -> out [B, N, H, D], lse [B, H, N]."""

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
        """Gradients of q, k and v; those of earlier chunks' pages grow in place."""
