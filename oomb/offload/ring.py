"""The segment ring: a few GPU buffers through which host segments stream, in a known order.

The step says beforehand which segments it will ask for. The ring loads as many of them as it has
buffers; when one is let go, its gradients start their way back and the next load takes its place.
A segment that was not announced is loaded when it is asked for, and what was loaded ahead is
dropped: slower, never wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from oomb.cache.layout import SlotLayout
from oomb.cache.pool import PagePool
from oomb.offload.tier import Done, Pairs, Tier, waiting

NAN_BYTE = 0xFF
"""A float of such bytes is no number, in every dtype."""


@dataclass(frozen=True)
class Load:
    """Tokens [start, stop) of a host slot, for one layer.

    Attributes:
        layer: layer number.
        slot: slot of the host pools.
        start, stop: token range inside the slot.
        keys: whether K and V are wanted.
        gradients: whether their gradients are.
        returns: whether the gradients go back.
    """

    layer: int
    slot: int
    start: int
    stop: int
    keys: bool
    gradients: bool
    returns: bool


@dataclass
class Buffer:
    """Room for one segment on the GPU.

    Attributes:
        keys, gradients: uint8 [bytes]; gradients is None in the fill.
        free_after: what must have happened before it is used again.
    """

    keys: torch.Tensor
    gradients: torch.Tensor | None = None
    free_after: list[Done] = field(default_factory=list)


@dataclass
class HostPages:
    """The host's pools, and what they are waiting for.

    Attributes:
        keys: K and V.
        gradients: their gradients; None in the fill.
        written: by (content, layer, slot), the last copy out to it.
        touched: (layer, slot) of gradients that were written; others hold no numbers yet.
    """

    keys: PagePool
    gradients: PagePool | None = None
    written: dict[tuple[str, int, int], Done] = field(default_factory=dict)
    touched: set[tuple[int, int]] = field(default_factory=set)


class SegmentRing:
    """Streams segments through `depth` buffers.

    Args:
        tier: copies.
        host: where segments come from; its pools say how they lie.
        depth: buffers; one is in use while the others are loaded.
        device: of the buffers.
        poison: fill what is let go with NaN, so that a use of it shows.
    """

    def __init__(
        self,
        tier: Tier,
        host: HostPages,
        depth: int,
        device: torch.device,
        *,
        poison: bool = False,
    ) -> None:
        self._tier, self._host = tier, host
        self._device, self._poison = device, poison
        self._free = deque(Buffer(self.room_for_keys()) for _ in range(depth))
        self._announced: Iterator[Load] = iter(())
        self._loaded: deque[tuple[Load, Buffer, list[Done]]] = deque()
        self.unannounced = 0

    def room_for_keys(self) -> torch.Tensor:
        """A GPU buffer that holds the K and V of any layer's segment: uint8 [bytes]."""
        return self._room(self._host.keys.layouts)

    def _room(self, layouts: Sequence[SlotLayout]) -> torch.Tensor:
        size = max(layout.nbytes for layout in layouts)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def open_gradients(self) -> None:
        """Give every buffer room for the gradients that the host has now."""
        self._drop()
        for buffer in self._free:
            buffer.gradients = self._room(self._host.gradients.layouts)

    def announce(self, loads: Iterable[Load]) -> None:
        """Forget what was announced before; these come next, in this order."""
        self._drop()
        self._announced = iter(loads)
        self._load_ahead()

    @contextmanager
    def holding(self, load: Load) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Slots of K and V and of their gradients, uint8 [bytes], until the block ends."""
        buffer, loaded = self._take(load)
        in_use = ([buffer.keys] if load.keys else []) + (
            [buffer.gradients] if load.gradients else []
        )
        with waiting(loaded, load.layer):
            for room in in_use:
                self._tier.begin(room, loaded)
        fresh = load.gradients and (load.layer, load.slot) not in self._host.touched
        if fresh:
            buffer.gradients[: self._host.gradients.layouts[load.layer].nbytes].zero_()
        try:
            yield (
                buffer.keys if load.keys else None,
                buffer.gradients if load.gradients else None,
            )
        finally:
            if self._poison and load.keys:
                buffer.keys.fill_(NAN_BYTE)
            buffer.free_after = [self._tier.end(room) for room in in_use]
            if load.returns:
                self._return(load, buffer, whole=fresh)
            self._free.append(buffer)
            self._load_ahead()

    def _take(self, load: Load) -> tuple[Buffer, list[Done]]:
        if self._loaded and self._loaded[0][0] == load:
            _, buffer, loaded = self._loaded.popleft()
            return buffer, loaded
        self.unannounced += 1
        self._drop()
        self._announced = iter(())
        return self._load(load)

    def _load_ahead(self) -> None:
        while self._free:
            load = next(self._announced, None)
            if load is None:
                return
            self._loaded.append((load, *self._load(load)))

    def _load(self, load: Load) -> tuple[Buffer, list[Done]]:
        """Start loading into a free buffer: returns it, and what must happen before its use."""
        buffer = self._free.popleft()
        after, pairs = list(buffer.free_after), []
        if load.keys:
            pairs += self._pairs(self._host.keys, buffer.keys, load)
            after += self._last_written("keys", load)
        if load.gradients and (load.layer, load.slot) in self._host.touched:
            pairs += self._pairs(self._host.gradients, buffer.gradients, load)
            after += self._last_written("gradients", load)
        if not pairs:
            return buffer, after
        return buffer, [self._tier.copy_in(pairs, after, load.layer)]

    def _return(self, load: Load, buffer: Buffer, *, whole: bool) -> None:
        """Send gradients back; all of a slot's when they are its first."""
        host, layout = self._host.gradients, self._host.gradients.layouts[load.layer]
        start, stop = (0, layout.tokens) if whole else (load.start, load.stop)
        pairs = layout.pairs(host.slot(load.layer, load.slot), buffer.gradients, start, stop)
        done = self._tier.copy_out(pairs, buffer.free_after, load.layer)
        self._host.touched.add((load.layer, load.slot))
        self._host.written["gradients", load.layer, load.slot] = done
        buffer.free_after = [*buffer.free_after, done]

    def _last_written(self, content: str, load: Load) -> list[Done]:
        done = self._host.written.get((content, load.layer, load.slot))
        return [] if done is None else [done]

    def _drop(self) -> None:
        """Let go of everything that was loaded ahead."""
        while self._loaded:
            _, buffer, loaded = self._loaded.popleft()
            buffer.free_after = loaded
            self._free.append(buffer)

    @staticmethod
    def _pairs(host: PagePool, room: torch.Tensor, load: Load) -> Pairs:
        layout = host.layouts[load.layer]
        return layout.pairs(room, host.slot(load.layer, load.slot), load.start, load.stop)
