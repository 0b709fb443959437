"""Attention outputs that the fill keeps for the sweep, so that it need not compute them again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from oomb.cache.pool import LayerShape
from oomb.chunking import Chunk
from oomb.profiling.live_bytes import category

Kept = tuple[torch.Tensor, torch.Tensor]


class FillOutputs:
    """Per chunk and layer, attention's output and log-sum-exp, until the chunk is swept.

    Args:
        keep: whether to keep any; every method is a no-op otherwise.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._kept: dict[int, dict[int, Kept]] = {}

    @property
    def wanted(self) -> bool:
        """Whether any are kept."""
        return self._keep

    def counted(self) -> AbstractContextManager[None]:
        """Storages made inside count as `fill_outputs`, if they are to be kept."""
        return category("fill_outputs") if self._keep else nullcontext()

    def put(self, chunk: Chunk, layer: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Keep a layer's output [B, n, H, D] and log-sum-exp [B, H, n]."""
        if self._keep:
            self._kept.setdefault(chunk.index, {})[layer] = (out, lse)

    def get(self, chunk: Chunk, layer: int) -> Kept | None:
        """What was kept, as tensors that a graph may be hung on; None for a chunk without fill."""
        kept = self._kept.get(chunk.index, {}).get(layer)
        return None if kept is None else (kept[0].detach(), kept[1].detach())

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk's outputs are kept."""
        return chunk.index in self._kept

    def expect(self, chunk: Chunk, layers: Iterable[int]) -> None:
        """Say in which order a chunk's outputs will be asked for."""

    def close(self) -> None:
        """The step is over, or abandoned."""

    def drop(self, chunk: Chunk) -> None:
        """Forget a chunk that is swept."""
        self._kept.pop(chunk.index, None)

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return sum(
            tensor.nbytes
            for layers in self._kept.values()
            for kept in layers.values()
            for tensor in kept
        )


def output_bytes(shape: LayerShape, query_heads: int, tokens: int) -> tuple[int, int]:
    """Bytes of a layer's attention outputs and of their log-sum-exps."""
    wide = torch.promote_types(shape.dtype, torch.float32)
    numbers = tokens * query_heads
    return numbers * shape.dim * shape.dtype.itemsize, numbers * wide.itemsize
