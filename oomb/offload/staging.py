"""GPU buffers in which what leaves for the host waits, so that its source may change meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from oomb.offload.ring import NAN_BYTE
from oomb.offload.tier import Done, Pairs, Tier, waiting


class Staging:
    """Sends through a few buffers, taken in turns.

    Args:
        tier: copies.
        rooms: the buffers, uint8 [bytes].
        poison: fill a buffer with NaN before it is used again.
    """

    def __init__(self, tier: Tier, rooms: list[torch.Tensor], *, poison: bool) -> None:
        self._tier, self._poison = tier, poison
        self._rooms: deque[tuple[torch.Tensor, list[Done]]] = deque((room, []) for room in rooms)

    def send(self, fill: Callable[[torch.Tensor], Pairs], layer: int) -> Done:
        """Have a buffer filled, and start the copies that `fill` names from there to the host."""
        room, free_after = self._rooms.popleft()
        with waiting(free_after, layer):
            self._tier.begin(room, free_after)
        if self._poison:
            room.fill_(NAN_BYTE)
        pairs = fill(room)
        sent = self._tier.copy_out(pairs, [self._tier.end(room)], layer)
        self._rooms.append((room, [sent]))
        return sent
