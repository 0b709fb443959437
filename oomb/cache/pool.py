"""Memory for pages: one preallocated tensor per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

K, V = 0, 1


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores per token: `heads` K and V vectors of `dim` numbers."""

    heads: int
    dim: int
    dtype: torch.dtype


class PagePool:
    """Slots of `tokens_per_slot` tokens, laid out per layer as [slot][K|V][token][kv head][dim].

    A slot read as [1, kv heads, tokens, dim] is a plain strided view, which is what attention
    kernels take; V lies a constant offset behind K, so that a slot moves in one copy.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        *,
        slots: int,
        tokens_per_slot: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        zero: bool = False,
    ) -> None:
        make = torch.zeros if zero else torch.empty
        self._buffers = [
            make(shape, dtype=kind, device=device)
            for shape, kind in _buffers(layers, slots, tokens_per_slot, dtype)
        ]

    @classmethod
    def over(
        cls,
        memory: list[torch.Tensor],
        layers: list[LayerShape],
        *,
        slots: int,
        tokens_per_slot: int,
        dtype: torch.dtype | None = None,
    ) -> PagePool:
        """A pool over memory that is there: uint8 [bytes] per layer, of which it uses the front."""
        pool = cls.__new__(cls)
        pool._buffers = [
            piece[: math.prod(shape) * kind.itemsize].view(kind).view(shape)
            for piece, (shape, kind) in zip(
                memory, _buffers(layers, slots, tokens_per_slot, dtype), strict=True
            )
        ]
        return pool

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of each layer's numbers."""
        return [buffer.dtype for buffer in self._buffers]

    def slot(self, layer: int, slot: int) -> torch.Tensor:
        """All of a slot: [K|V, tokens, kv heads, dim]."""
        return self._buffers[layer][slot]

    def tokens(
        self, layer: int, slot: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of tokens [start, stop) of a slot: K and V, each [1, kv heads, tokens, dim]."""
        return as_attended(self._buffers[layer][slot, :, start:stop])

    def all_tokens(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token of a layer: K and V, each a view [1, kv heads, rows, dim].

        Row r of V belongs to row r of K. A slot's K starts at row 2 * slot * tokens_per_slot; the
        rows behind its K (its V, in the view of K) are not to be read.
        """
        buffer = self._buffers[layer]
        rows = buffer.flatten(0, 2).transpose(0, 1)[None]
        return rows[:, :, : rows.shape[2] - buffer.shape[2]], rows[:, :, buffer.shape[2] :]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""
        return sum(2 * b.shape[3] * b.shape[4] * b.element_size() for b in self._buffers)


def as_attended(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a slot [K|V, tokens, heads, dim] as K and V, views [1, heads, tokens, dim]."""
    both = both.transpose(1, 2)
    return both[K : K + 1], both[V : V + 1]


def _buffers(
    layers: list[LayerShape], slots: int, tokens_per_slot: int, dtype: torch.dtype | None
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each layer's buffer."""
    return [
        (
            (slots, 2, tokens_per_slot, layer.heads, layer.dim),
            torch.promote_types(dtype or layer.dtype, layer.dtype),
        )
        for layer in layers
    ]
