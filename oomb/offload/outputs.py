"""Attention outputs that the fill leaves on the host, and that come back layer by layer.

Unlike a segment, an output stays on the GPU once it has come: the backward needs it. So each gets
memory of its own, two layers before it is used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from oomb.chunking import Chunk
from oomb.fill_outputs import FillOutputs, Kept, output_bytes
from oomb.offload.staging import Staging
from oomb.offload.store import OffloadStore
from oomb.offload.tier import Done, Pairs, waiting
from oomb.probes import AttentionLayer
from oomb.profiling.live_bytes import category

OUTPUTS = "attention outputs"
ALIGNMENT = 8
"""Bytes; the widest numbers have as many."""
AHEAD = 2
"""Layers whose outputs are on their way at a time; as many wait for their way to the host."""


def host_memory(layers: list[AttentionLayer], tokens: int) -> dict[str, list[int]]:
    """What a step asks of the host for the outputs of so many tokens, all rows together."""
    return {OUTPUTS: [size for layer in layers for size in _bytes(layer, tokens)]}


class HostOutputs(FillOutputs):
    """Per chunk and layer, attention's output and log-sum-exp, in host memory.

    Args:
        store: the tier, and host memory that is reserved for the step.
        layers: attention layers.
        chunks: those that are filled and run again later, from the first on.
        rows: rows of the batch.
        device: of the model.
    """

    def __init__(
        self,
        store: OffloadStore,
        layers: list[AttentionLayer],
        chunks: Sequence[Chunk],
        rows: int,
        device: torch.device,
    ) -> None:
        super().__init__(keep=True)
        self._tier, self._device = store.tier, device
        self._layers, self._rows = layers, rows
        self._first = {chunk.index: rows * chunk.start for chunk in chunks}
        self._tokens = {chunk.index: rows * (chunk.stop - chunk.start) for chunk in chunks}
        self._host = store.pieces(OUTPUTS)
        longest = max(self._tokens.values())
        room = ALIGNMENT + max(sum(_bytes(layer, longest)) for layer in layers)
        with category("segment_ring"):
            rooms = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(AHEAD)]
        self._staging = Staging(self._tier, rooms, poison=store.config.poison)
        self._sent: dict[tuple[int, int], Done] = {}
        self._announced: deque[int] = deque()
        self._coming: deque[tuple[int, Kept, Done]] = deque()

    def put(self, chunk: Chunk, layer: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """See `FillOutputs`; it is on its way to the host when this returns."""

        def fill(room: torch.Tensor) -> Pairs:
            staged = _views(room, (out.shape, out.dtype), (lse.shape, lse.dtype))
            for to, source in zip(staged, (out, lse), strict=True):
                to.copy_(source)
            return list(zip(self._place(chunk, layer), staged, strict=True))

        self._sent[chunk.index, layer] = self._staging.send(fill, layer)

    def expect(self, chunk: Chunk, layers: Iterable[int]) -> None:
        """See `FillOutputs`."""
        self._coming.clear()
        self._announced = deque(layers)
        self._load_ahead(chunk)

    def get(self, chunk: Chunk, layer: int) -> Kept | None:
        """See `FillOutputs`."""
        if (chunk.index, layer) not in self._sent:
            return None
        if self._coming and self._coming[0][0] == layer:
            _, kept, come = self._coming.popleft()
        else:  # not announced
            self.expect(chunk, ())
            kept, come = self._load(chunk, layer)
        with waiting([come], layer):
            self._tier.wait([come])
        self._load_ahead(chunk)
        return kept

    def _load_ahead(self, chunk: Chunk) -> None:
        while self._announced and len(self._coming) < AHEAD:
            layer = self._announced.popleft()
            self._coming.append((layer, *self._load(chunk, layer)))

    def _load(self, chunk: Chunk, layer: int) -> tuple[Kept, Done]:
        host = self._place(chunk, layer)
        with category("fill_outputs"):
            kept = tuple(torch.empty(x.shape, dtype=x.dtype, device=self._device) for x in host)
        ready = []
        for x in kept:  # kernels may still use the memory that these were given
            self._tier.begin(x, ())
            ready.append(self._tier.end(x))
        after = [*ready, self._sent[chunk.index, layer]]
        return kept, self._tier.copy_in(list(zip(kept, host, strict=True)), after, layer)

    def _place(self, chunk: Chunk, layer: int) -> Kept:
        """Where on the host a chunk's output [B, n, H, D] and log-sum-exp [B, H, n] belong."""
        shape, heads = self._layers[layer].shape, self._layers[layer].query_heads
        tokens = chunk.stop - chunk.start
        wide = torch.promote_types(shape.dtype, torch.float32)
        sizes = (self._rows, tokens, heads, shape.dim), (self._rows, heads, tokens)
        first = _bytes(self._layers[layer], self._first[chunk.index])
        return tuple(
            _views(self._host[2 * layer + which][first[which] :], (size, dtype))[0]
            for which, (size, dtype) in enumerate(zip(sizes, (shape.dtype, wide), strict=True))
        )

    def has(self, chunk: Chunk) -> bool:
        """See `FillOutputs`."""
        return (chunk.index, 0) in self._sent

    def drop(self, chunk: Chunk) -> None:
        """See `FillOutputs`."""
        self._coming.clear()
        for layer in range(len(self._layers)):
            self._sent.pop((chunk.index, layer), None)

    def close(self) -> None:
        """See `FillOutputs`."""
        self._coming.clear()
        self._tier.settle()

    @property
    def nbytes(self) -> int:
        """See `FillOutputs`; here they are on the host."""
        return sum(
            sum(_bytes(self._layers[layer], self._tokens[index])) for index, layer in self._sent
        )


def _bytes(layer: AttentionLayer, tokens: int) -> tuple[int, int]:
    return output_bytes(layer.shape, layer.query_heads, tokens)


def _views(memory: torch.Tensor, *wanted: tuple[Sequence[int], torch.dtype]) -> list[torch.Tensor]:
    """Tensors side by side in uint8 memory, each where its numbers may begin."""
    found, start = [], 0
    for shape, dtype in wanted:
        size = math.prod(shape) * dtype.itemsize
        found.append(memory[start : start + size].view(dtype).view(tuple(shape)))
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return found
