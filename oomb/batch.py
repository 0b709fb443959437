"""The arguments of a step, checked and brought into one form before any work starts."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Batch:
    """A checked batch. Tensors stay where the caller put them.

    Attributes:
        input_ids: int64 [B, N].
        labels: int64 [B, N], not shifted.
        position_ids: int64 [B, N] or [1, N], or None: counted from each document's start.
        attention_mask: [B, N] as given, or None.
        lengths: tokens in each row without padding.
        documents: columns at which each row's documents start.
        num_label_tokens: labels that count.
        denominator: what the summed loss is divided by; 0 where no label counts.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    lengths: list[int]
    documents: list[list[int]]
    num_label_tokens: int
    denominator: float


def check_batch(
    input_ids: Any,
    labels: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    document_ids: Any = None,
    num_items_in_batch: Any = None,
    *,
    vocab_size: int,
    device: torch.device,
    max_positions: int | None,
) -> Batch:
    """Check a step's arguments.

    Args:
        input_ids: [B, N] integer token ids.
        labels: [B, N] integers, -100 ignored; None takes `input_ids`.
        attention_mask: [B, N], 1 on tokens and 0 on padding to their right.
        position_ids: [B, N] or [1, N]; a jump other than +1 starts a new document.
        document_ids: [B, N] integers, one run per document.
        num_items_in_batch: divide the summed loss by this instead of by the counted labels.
        vocab_size: number of token ids the model knows.
        device: the model's device; tensors may be there or on the CPU.
        max_positions: rows of a learned position table, or None.

    Returns:
        The batch, in tensors of its own.

    Raises:
        TypeError: an argument is not a tensor of the right kind.
        ValueError: an argument has a wrong shape, device or value.
    """
    input_ids = _integers("input_ids", input_ids, device)
    if input_ids.ndim != 2:
        raise ValueError(
            f"input_ids must have shape [batch, tokens], got {_shape(input_ids)}; "
            "add a batch dimension with input_ids[None]"
        )
    if input_ids.numel() == 0:
        raise ValueError(
            f"input_ids must hold at least one token in each of at least one row, got "
            f"{_shape(input_ids)}"
        )
    _check_range("input_ids", input_ids, 0, vocab_size - 1, "the model's vocabulary")
    shape = input_ids.shape
    if labels is not None:
        labels = _integers("labels", labels, device)
        _check_shape("labels", labels, (shape,))
    if document_ids is not None:
        document_ids = _integers("document_ids", document_ids, device)
        _check_shape("document_ids", document_ids, (shape,))
    if position_ids is not None:
        position_ids = _integers("position_ids", position_ids, device)
        _check_shape("position_ids", position_ids, (shape, torch.Size([1, shape[1]])))
        _check_range("position_ids", position_ids, 0, None, "positions")
    lengths = _lengths(attention_mask, shape, device)
    if labels is not None:
        _check_labels(labels, lengths, vocab_size)
    documents = _documents(document_ids, position_ids, lengths)
    if max_positions is not None:
        _check_positions_fit(position_ids, lengths, documents, max_positions)
    labels = input_ids if labels is None else labels
    count = _count_labels(labels, lengths, documents)
    denominator = count if num_items_in_batch is None else _denominator(num_items_in_batch)
    return Batch(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        attention_mask=None if attention_mask is None else attention_mask.to(torch.bool, copy=True),
        lengths=lengths,
        documents=documents,
        num_label_tokens=count,
        denominator=float(denominator),
    )


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))


def _integers(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """A copy in int64, in which -100 and differences mean what they say.

    The caller may change or refill the tensor before the step has read all of it.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(value).__name__}")
    if value.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name} must have an integer dtype such as torch.int64, got {value.dtype}")
    if value.device.type != "cpu" and value.device != device:
        raise ValueError(
            f"{name} must be on the CPU or on the model's device {device}, got {value.device}"
        )
    return value.to(torch.int64, copy=True)


def _check_shape(name: str, value: torch.Tensor, allowed: tuple[torch.Size, ...]) -> None:
    if value.shape not in allowed:
        expected = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{name} must have shape {expected} like input_ids, got {_shape(value)}")


def _check_range(name: str, value: torch.Tensor, low: int, high: int | None, what: str) -> None:
    least, most = (int(x) for x in torch.aminmax(value))
    if least < low or (high is not None and most > high):
        bounds = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} must lie in {what}, {bounds}, got {least} to {most}")


def _check_labels(labels: torch.Tensor, lengths: list[int], vocab_size: int) -> None:
    counted = labels != IGNORED
    if bool(((labels < 0) | (labels >= vocab_size))[counted].any()):
        wrong = labels[counted & ((labels < 0) | (labels >= vocab_size))][0]
        raise ValueError(
            f"labels must be {IGNORED} (ignored) or lie in the model's vocabulary, 0 to "
            f"{vocab_size - 1}, got {int(wrong)}"
        )
    for row, length in enumerate(lengths):
        # column 0 is never predicted, so its label does not count
        if length < labels.shape[1] and bool(counted[row, max(length, 1) :].any()):
            raise ValueError(
                f"labels must be {IGNORED} where attention_mask is 0, got a counted label on "
                f"padding in row {row}; set labels[attention_mask == 0] = {IGNORED}"
            )


def _lengths(attention_mask: Any, shape: torch.Size, device: torch.device) -> list[int]:
    if attention_mask is None:
        return [shape[1]] * shape[0]
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    if attention_mask.device.type != "cpu" and attention_mask.device != device:
        raise ValueError(
            f"attention_mask must be on the CPU or on the model's device {device}, got "
            f"{attention_mask.device}"
        )
    _check_shape("attention_mask", attention_mask, (shape,))
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError("attention_mask must hold only 0 and 1 (or booleans)")
    mask = attention_mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask must be 1 on tokens and 0 on padding to their right, got a 0 before "
            "a 1; left padding is not supported: pad on the right (tokenizer.padding_side='right')"
        )
    lengths = mask.sum(1).tolist()
    if max(lengths) == 0:
        raise ValueError("attention_mask must keep at least one token, got only 0")
    return lengths


def _documents(
    document_ids: torch.Tensor | None, position_ids: torch.Tensor | None, lengths: list[int]
) -> list[list[int]]:
    """Columns at which each row's documents start."""
    if document_ids is not None:
        starts = document_ids[:, 1:] != document_ids[:, :-1]
    elif position_ids is not None:
        starts = (position_ids[:, 1:] - position_ids[:, :-1] != 1).expand(len(lengths), -1)
    else:
        return [[0]] * len(lengths)
    documents = []
    for row, length in enumerate(lengths):
        columns = [0, *(starts[row, : max(length - 1, 0)].nonzero().flatten() + 1).tolist()]
        documents.append(columns)
        if document_ids is not None:
            names = document_ids[row, columns].tolist()
            if len(set(names)) != len(names):
                raise ValueError(
                    f"document_ids must hold each document as one run of tokens, got a document "
                    f"in several pieces in row {row}; give each piece its own id"
                )
    return documents


def _count_labels(labels: torch.Tensor, lengths: list[int], documents: list[list[int]]) -> int:
    """Counted labels: not ignored, not in column 0, not a document's first token, not padding."""
    count = 0
    for row, (length, starts) in enumerate(zip(lengths, documents, strict=True)):
        counted = labels[row, 1:length] != IGNORED
        firsts = torch.tensor(starts[1:], device=counted.device, dtype=torch.int64) - 1
        count += int(counted.sum()) - int(counted[firsts].sum())
    return count


def _denominator(num_items_in_batch: Any) -> float:
    items = num_items_in_batch
    if isinstance(items, torch.Tensor) and items.numel() == 1 and not items.is_meta:
        items = items.item()
    is_number = isinstance(items, numbers.Real) and not isinstance(items, bool)
    if not (is_number and 0 < items < math.inf):
        raise ValueError(
            "num_items_in_batch must be a positive, finite number or 0-d tensor, got "
            f"{num_items_in_batch!r}"
        )
    return float(items)


def _check_positions_fit(
    position_ids: torch.Tensor | None,
    lengths: list[int],
    documents: list[list[int]],
    max_positions: int,
) -> None:
    if position_ids is not None:
        longest = int(position_ids.max()) + 1
    else:
        longest = max(
            b - a
            for length, starts in zip(lengths, documents, strict=True)
            for a, b in zip(starts, [*starts[1:], max(length, starts[-1])], strict=True)
        )
    if longest > max_positions:
        raise ValueError(
            f"input_ids must fit the model's {max_positions} learned positions, got a document of "
            f"{longest} tokens; shorten it"
        )
