"""Memory for pages: one preallocated tensor per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oomb.cache.fp8 import FP8
from oomb.cache.layout import SlotLayout, as_attended


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores per token: `heads` K and V vectors of `dim` numbers."""

    heads: int
    dim: int
    dtype: torch.dtype


class PagePool:
    """Slots of one layout per layer.

    Args:
        layouts: of each layer's slots.
        slots: how many.
        device: where they are made.
        zero: whether they begin as zeros.
    """

    def __init__(
        self,
        layouts: Sequence[SlotLayout],
        *,
        slots: int,
        device: torch.device,
        zero: bool = False,
    ) -> None:
        make = torch.zeros if zero else torch.empty
        self.layouts = layouts
        self._slots = [
            make((slots, layout.nbytes), dtype=torch.uint8, device=device) for layout in layouts
        ]

    @classmethod
    def over(
        cls, memory: list[torch.Tensor], layouts: Sequence[SlotLayout], *, slots: int
    ) -> PagePool:
        """A pool over memory that is there: uint8 [bytes] per layer, of which it uses the front."""
        pool = cls.__new__(cls)
        pool.layouts = layouts
        pool._slots = [
            piece[: slots * layout.nbytes].view(slots, layout.nbytes)
            for piece, layout in zip(memory, layouts, strict=True)
        ]
        return pool

    def slot(self, layer: int, slot: int) -> torch.Tensor:
        """All of a slot: uint8 [bytes]."""
        return self._slots[layer][slot]

    def tokens(
        self, layer: int, slot: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of tokens [start, stop) of a slot: K and V, each [1, kv heads, tokens, dim]."""
        numbers = self.layouts[layer].numbers(self.slot(layer, slot))
        return as_attended(numbers[:, start:stop])

    def all_tokens(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token of a layer without scales: K and V, each a view [1, kv heads, rows, dim].

        Row r of V belongs to row r of K. A slot's K starts at row 2 * slot * tokens of a slot; the
        rows behind its K (its V, in the view of K) are not to be read.
        """
        layout = self.layouts[layer]
        rows = layout.numbers(self._slots[layer]).flatten(0, 2).transpose(0, 1)[None]
        return rows[:, :, : rows.shape[2] - layout.tokens], rows[:, :, layout.tokens :]

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes over all layers."""
        return sum(layout.page_bytes for layout in self.layouts)


def key_layouts(
    layers: Sequence[LayerShape], tokens: int, page_size: int, page_dtype: str | None = None
) -> list[SlotLayout]:
    """How slots of `tokens` tokens hold K and V: as the model makes them, or in fp8 with scales."""
    scaled = page_dtype is not None
    return [
        SlotLayout(
            tokens, each.heads, each.dim, FP8 if scaled else each.dtype, page_size, scaled=scaled
        )
        for each in layers
    ]


def gradient_layouts(
    layers: Sequence[LayerShape], tokens: int, page_size: int, dtype: torch.dtype
) -> list[SlotLayout]:
    """How slots of `tokens` tokens hold page gradients.

    In `dtype`, or the layer's own where that is wider; bf16 is taken at its word.
    """
    return [
        SlotLayout(
            tokens,
            each.heads,
            each.dim,
            dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, each.dtype),
            page_size,
        )
        for each in layers
    ]
