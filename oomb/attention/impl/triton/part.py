"""Keys that one launch attends to, and how kernels are given them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from oomb.attention.impl.triton.configs import Tile, has_copy_engine, tiles

SMALLEST_DESCRIBED = 32
"""A page needs this many tokens in a power of two before tiles are cut to fit inside it."""


@dataclass(frozen=True)
class Part:
    """Keys that one launch attends to.

    Attributes:
        k, v: [B, G, rows, dim]; B is 1 where they lie in pages.
        grad_k, grad_v: their gradients so far, same layout; None in a forward.
        page_rows: int32 [pages], the row of each page's first key; None where key j is row j.
        page: tokens per page, 0 without pages.
        keys: number of keys.
        offset: position of the first query minus position of the first key.
        causal: a query sees no key behind its own position.
        window: a query sees only keys less than this many positions back; None sees all.
        lowest: int32 [B, N], the first key that each query may see; None where it is 0.
        beyond: int32 [B, keys], the first query that each key's document does not hold.
        copies: whether the GPU has a copy engine that fetches a tile of a page by its descriptor.
    """

    k: torch.Tensor
    v: torch.Tensor
    keys: int
    grad_k: torch.Tensor | None = None
    grad_v: torch.Tensor | None = None
    page_rows: torch.Tensor | None = None
    page: int = 0
    offset: int = 0
    causal: bool = False
    window: int | None = None
    lowest: torch.Tensor | None = None
    beyond: torch.Tensor | None = None
    copies: bool = True

    @property
    def width(self) -> int:
        """Head dim, padded to what the matrix units take."""
        return max(16, triton.next_power_of_2(self.k.shape[3]))

    def fit(self, tile: Tile) -> tuple[int, bool]:
        """Keys per tile, and whether it is loaded row by row."""
        if not self.copies:  # a descriptor would become an address per number
            return tile.keys, True
        if not self.page:
            return tile.keys, False
        inside = self.page & -self.page  # the largest power of two that divides a page
        if inside >= min(tile.keys, SMALLEST_DESCRIBED):
            return min(tile.keys, inside), False
        return tile.keys, True

    def flags(self, keys: int, gather: bool) -> dict[str, object]:
        """What is compiled into a kernel for this part."""
        return {
            "D": self.width,
            "DIM": self.k.shape[3],
            "PAGE": self.page,
            "BN": keys,
            "GATHER": gather,
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "DOCUMENTS": self.lowest is not None,
            "PRECISION": "tf32x3" if self.k.dtype == torch.float32 else "ieee",
        }

    def key(self, kernel: str) -> tuple:
        """What the choice of a tile depends on."""
        return (
            kernel, self.k.device, self.k.dtype, self.k.shape[3], self.page, self.causal,
            self.window is None, self.lowest is None,
        )  # fmt: skip

    def cut(self, kernel: str) -> bool:
        """Whether a mask cuts many of the tiles that a kernel walks over."""
        masked = self.window is not None or self.lowest is not None
        return masked or (self.causal and kernel == "key_grads")

    def candidates(self, kernel: str) -> list[Tile]:
        """Tiles to try for a kernel."""
        capability = capability_of(self.k.device)
        cut = self.cut(kernel)
        return self.by_fit(tiles(kernel, capability, self.k.dtype, self.width, cut=cut))

    def by_fit(self, found: list[Tile]) -> list[Tile]:
        """The same tiles; those that would shrink to lie inside a page go last."""
        return sorted(found, key=lambda tile: self.fit(tile)[0] < tile.keys)


def sources(x: torch.Tensor, y: torch.Tensor, rows: int, width: int, *, described: bool) -> tuple:
    """Two tensors as a kernel takes them: two descriptors of tiles [rows, width], or pointers."""
    if not described:
        return None, None, x, y
    block = [1, 1, rows, width]
    return _descriptor(x, block), _descriptor(y, block), None, None


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) is the interpreter's."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_copies(x: torch.Tensor) -> bool:
    """Whether tiles of a tensor can be fetched by descriptors."""
    return has_copy_engine(capability_of(x.device))


def _descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    # A dimension of size 1 may have any stride, which a descriptor would not take.
    strides = [s if n > 1 else x.shape[3] for s, n in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], block)
