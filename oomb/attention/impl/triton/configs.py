"""Tile sizes per kernel, device, dtype and head dim, and a launch that falls back to smaller ones.

Nothing is tuned at run time: the first entry that fits a device's shared memory is used, and
remembered. The entries for Hopper were measured on an H200; see `ladder.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources, PTXASError

HOPPER, INTERPRETER = (9, 0), (0, 0)
"""Compute capabilities; the interpreter has none."""
KERNELS = ("attend", "key_grads", "query_grads")


@dataclass(frozen=True)
class Tile:
    """How one program cuts its work.

    Attributes:
        queries, keys: rows of a block of queries and of a tile of keys.
        warps: warps per program.
        stages: tiles on their way from memory at a time.
    """

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, bytes per number and padded head dim, best first, as measured on an H200.
_HOPPER = {
    ("attend", 2, 64): [Tile(64, 128, 4, 3), Tile(64, 64, 4, 3)],
    ("attend", 2, 128): [Tile(128, 64, 4, 2)],
    ("attend", 2, 256): [Tile(128, 64, 8, 2)],
    ("key_grads", 2, 64): [Tile(128, 64, 4, 2)],
    ("key_grads", 2, 128): [Tile(64, 128, 8, 3), Tile(64, 64, 4, 2)],
    ("key_grads", 2, 256): [Tile(64, 64, 8, 2)],
    ("query_grads", 2, 64): [Tile(64, 64, 4, 2)],
    ("query_grads", 2, 128): [Tile(128, 128, 8, 2), Tile(64, 64, 4, 2)],
    ("query_grads", 2, 256): [Tile(64, 32, 4, 3)],
    ("attend", 4, 128): [Tile(32, 32, 4, 1)],
}
# The same for parts that a mask cuts: small tiles waste less along its edges.
_HOPPER_CUT = {
    ("attend", 2, 64): [Tile(64, 64, 4, 3)],
    ("key_grads", 2, 64): [Tile(64, 64, 4, 3)],
    ("attend", 2, 128): [Tile(64, 64, 4, 3)],
    ("key_grads", 2, 128): [Tile(64, 64, 4, 2)],
    ("query_grads", 2, 128): [Tile(128, 64, 8, 3)],
}
# Before Hopper nothing was measured: the largest tiles whose registers do not spill when compiled.
_BEFORE_HOPPER = {("key_grads", 2, 64): [Tile(64, 64, 8, 2)]}
# Everything else, and what follows where those do not fit: from large to one that always fits.
_ANYWHERE = [
    Tile(128, 64, 8, 2),
    Tile(64, 64, 8, 2),
    Tile(64, 32, 8, 2),
    Tile(32, 32, 4, 1),
    Tile(16, 16, 4, 1),
]
_remembered: dict[tuple, int] = {}


def tiles(
    kernel: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int,
    *,
    cut: bool = False,
) -> list[Tile]:
    """Tiles to try, best first.

    Args:
        kernel: one of `KERNELS`.
        capability: compute capability of the GPU.
        dtype: dtype of K and V.
        width: head dim, padded to a power of two.
        cut: whether a mask hides some of the keys.

    Returns:
        Tiles; the last fits every device.
    """
    key = (kernel, dtype.itemsize, width)
    first = []
    if capability[0] == 9:
        first = (_HOPPER_CUT.get(key, []) if cut else []) + _HOPPER.get(key, [])
    elif capability < HOPPER:
        first = _BEFORE_HOPPER.get(key, [])
    widest = max(16, 64 * 2 * 128 // (dtype.itemsize * width))  # as many bytes as 64 x 128 halves
    general = [tile for tile in _ANYWHERE if tile.keys <= widest]
    return first + general


def has_copy_engine(capability: tuple[int, int]) -> bool:
    """Whether a GPU fetches tiles by their descriptors: Hopper and later (or the interpreter)."""
    return capability >= HOPPER or capability == INTERPRETER


def launch_first_that_fits(
    key: tuple, candidates: list[Tile], launch: Callable[[Tile], None]
) -> None:
    """Launch with the first tile whose shared memory and registers the device has.

    Args:
        key: what the choice depends on; it is remembered under this.
        candidates: tiles, best first.
        launch: launches with a tile.

    Raises:
        RuntimeError: not even the smallest fits.
    """
    for number in range(_remembered.get(key, 0), len(candidates)):
        try:
            launch(candidates[number])
        except (OutOfResources, PTXASError) as error:
            if number + 1 == len(candidates):
                raise RuntimeError(
                    f"no tile of kernel {key[0]} fits this device ({error}); use "
                    "attention_backend='reference'"
                ) from error
            continue
        _remembered[key] = number
        return
