"""What the engine hands back: the result of a step, and its state at each chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from oomb.cache.table import PageTableView

Phase = Literal["fill", "sweep"]


@dataclass(frozen=True)
class StepResult:
    """Outcome of one `Engine.step`.

    Attributes:
        loss: 0-d tensor on the model's device, fp32 (fp64 for an fp64 model), without graph. NaN
            where no label counts and `num_items_in_batch` is not given, as in transformers.
        num_label_tokens: labels that count towards the loss, over the whole batch.
        peak_memory: most bytes allocated on the GPU during the step; None on a CPU, where torch
            keeps no count (measure with `oomb.profiling.LiveBytes`).
    """

    loss: torch.Tensor
    num_label_tokens: int
    peak_memory: int | None
    _read_timings: Callable[[], dict[str, float]] = field(repr=False)

    @cached_property
    def timings(self) -> dict[str, float]:
        """Seconds spent in `fill`, `sweep` and `total`; on a GPU, reading waits for the step."""
        return self._read_timings()


@dataclass(frozen=True)
class ChunkState:
    """The engine just after one chunk of the fill or the sweep; a read-only picture.

    Attributes:
        phase: `fill` or `sweep`.
        chunk: number of the chunk just computed, from 0.
        num_chunks: chunks in the sequence; the last one has no fill.
        page_table: which pages hold K/V, where, and how many gradient terms each has received.
        bytes_alive: bytes by content: `kv_pages` and `page_gradients` of the pages held now,
            `page_summaries` and `selections` of sparse attention, `fill_outputs` of attention
            outputs kept for the sweep, `random_states` of the recorded generators; `host_` stands
            before what is on the host.
    """

    phase: Phase
    chunk: int
    num_chunks: int
    page_table: PageTableView
    bytes_alive: Mapping[str, int]
