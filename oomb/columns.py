"""A batch on the model's device, where chunks are cut from it as views.

Everything moves once, before the step's first kernel: a copy from the host's ordinary memory in
the middle of a step would make the host wait for the kernels before it.
"""

from __future__ import annotations

import torch

from oomb.batch import IGNORED, Batch
from oomb.profiling.live_bytes import category


class Columns:
    """What a step reads of a batch, by column ranges.

    Args:
        batch: checked arguments.
        device: where the model lives.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        with category("inputs"):
            self._ids = _moved(batch.input_ids, device)
            positions = batch.position_ids
            self._positions = _moved(_counted(batch) if positions is None else positions, device)
            self._targets = _moved(_targets(batch), device)
            mask = batch.attention_mask
            self._real = None if mask is None else _moved(mask, device)

    def inputs(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and position ids of columns [start, stop), each int64 [B, stop - start]."""
        ids = self._ids[:, start:stop]
        return ids, self._positions[:, start:stop].expand(ids.shape)

    def targets(self, start: int, stop: int) -> torch.Tensor:
        """What each token of columns [start, stop) should predict: int64 [B, stop - start].

        The labels are shifted over the whole sequence, so that a chunk's last token predicts the
        next chunk's first; padding, the first token of a document and the end count as ignored.
        """
        return self._targets[:, start:stop]

    def real_tokens(self, start: int, stop: int) -> torch.Tensor | None:
        """Bool [B, stop - start], False on padding; None where the caller gave no mask."""
        return None if self._real is None else self._real[:, start:stop]


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, without waiting for it to get there."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def _counted(batch: Batch) -> torch.Tensor:
    """Positions counted from each document's start, on the CPU: int64 [B, N]."""
    columns = torch.arange(batch.input_ids.shape[1], device="cpu")
    starts = torch.stack([_latest_starts(row, len(columns)) for row in batch.documents])
    # counting on over padding could leave a learned position table
    padding = columns >= torch.tensor(batch.lengths, device="cpu")[:, None]
    return (columns - starts).masked_fill_(padding, 0)


def _latest_starts(starts: list[int], columns: int) -> torch.Tensor:
    """For each column, the last document start at or before it."""
    latest = torch.zeros(columns, dtype=torch.int64, device="cpu")
    latest[starts] = torch.tensor(starts, device="cpu")
    return latest.cummax(0).values


def _targets(batch: Batch) -> torch.Tensor:
    """Shifted labels, where the labels are: int64 [B, N]."""
    ignored = torch.zeros(batch.labels.shape, dtype=torch.bool, device="cpu")
    for row, (length, starts) in enumerate(zip(batch.lengths, batch.documents, strict=True)):
        ignored[row, max(length - 1, 0) :] = True
        ignored[row, [first - 1 for first in starts[1:]]] = True
    targets = torch.full_like(batch.labels, IGNORED)
    targets[:, :-1] = batch.labels[:, 1:]
    return targets.masked_fill_(_moved(ignored, targets.device), IGNORED)
