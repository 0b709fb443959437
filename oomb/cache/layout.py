"""How a segment lies in the bytes of its slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

K, V = 0, 1
PARTS = 2
"""Scales per page and head: a page that a chunk border cuts is written by two chunks."""
ALIGNMENT = 16
"""Bytes; scales begin at a multiple, and so does the next slot."""


@dataclass(frozen=True)
class SlotLayout:
    """One layer's slot: numbers [K|V][token][kv head][dim], and scales behind them if there are.

    Numbers read as [1, kv heads, tokens, dim] are a plain strided view, which is what attention
    kernels take; V lies a constant offset behind K, and the scales in the same bytes, so that a
    slot moves in one copy.

    Attributes:
        tokens: of the slot.
        heads: K/V heads.
        dim: numbers per head.
        dtype: of the numbers.
        page_size: tokens of a page.
        scaled: whether each page and head has scales, as fp8 needs them.
    """

    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    page_size: int
    scaled: bool = False

    @property
    def nbytes(self) -> int:
        """Of a slot."""
        return self._scales_begin + self._scale_bytes

    @property
    def page_bytes(self) -> int:
        """What one page takes of a slot."""
        scales = 2 * PARTS * self.heads * torch.float32.itemsize if self.scaled else 0
        return 2 * self.page_size * self.heads * self.dim * self.dtype.itemsize + scales

    def numbers(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [..., bytes] as [..., K|V, tokens, heads, dim]."""
        shape = (2, self.tokens, self.heads, self.dim)
        return slots[..., : self._number_bytes].view(self.dtype).unflatten(-1, shape)

    def scales(self, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [..., bytes] as fp32 [..., K|V, pages, parts, heads]."""
        shape = (2, self.tokens // self.page_size, PARTS, self.heads)
        behind = slots[..., self._scales_begin : self.nbytes]
        return behind.view(torch.float32).unflatten(-1, shape)

    def pairs(
        self, to: torch.Tensor, source: torch.Tensor, start: int, stop: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of tokens [start, stop) between slots, uint8 [bytes]: one if it is all."""
        if (start, stop) == (0, self.tokens):
            return [(to[: self.nbytes], source[: self.nbytes])]
        both = self.numbers(to), self.numbers(source)
        found = [tuple(each[which, start:stop] for each in both) for which in (K, V)]
        if self.scaled:
            both = tuple(self.scales(slot).flatten(1, 2) for slot in (to, source))
            first, last = self.parts(start, stop)
            found += [tuple(each[which, first:last] for each in both) for which in (K, V)]
        return found

    def parts(self, start: int, stop: int) -> tuple[int, int]:
        """Which scales tokens [start, stop) have, counted over pages and parts."""
        page, rest = divmod(start, self.page_size)
        return PARTS * page + (rest > 0), PARTS * -(-stop // self.page_size)

    @property
    def _number_bytes(self) -> int:
        return 2 * self.tokens * self.heads * self.dim * self.dtype.itemsize

    @property
    def _scales_begin(self) -> int:
        return (
            -(-self._number_bytes // ALIGNMENT) * ALIGNMENT if self.scaled else self._number_bytes
        )

    @property
    def _scale_bytes(self) -> int:
        pages = self.tokens // self.page_size
        return 2 * pages * PARTS * self.heads * torch.float32.itemsize if self.scaled else 0


def as_attended(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a slot [K|V, tokens, heads, dim] as K and V, views [1, heads, tokens, dim]."""
    both = both.transpose(1, 2)
    return both[K : K + 1], both[V : V + 1]
