"""Exercise: exact gradients through a recurrent state, with one chunk alive."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from oomb.profiling import LiveBytes
from oomb_widgets.verdict import Verdict, call, hint

_CHUNKS, _CHUNK, _WIDTH, _VOCAB = 8, 16, 16, 13


class Cell(nn.Module):
    """A small recurrent network: `cell(ids, state)` returns (logits, the state after ids).

    Attributes:
        calls: How often it ran.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(values / shape[-1] ** 0.5)

        self.embed, self.mix, self.head = weight(_VOCAB, _WIDTH), weight(_WIDTH, _WIDTH), weight(
            _WIDTH, _VOCAB
        )  # fmt: skip
        self.calls = 0

    def forward(self, ids: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids [C] from state [width]; returns logits [C, vocab] and the state after them."""
        self.calls += 1
        outputs = []
        for token in self.embed[ids]:
            state = torch.tanh(token + state @ self.mix)
            outputs.append(state)
        return torch.stack(outputs) @ self.head, state


def judge_recurrent_step(answer: Callable) -> Verdict:
    """`answer(cell, chunks, labels, state)` adds exact gradients and returns the loss.

    chunks and labels are lists of [C] tensors, labels already shifted, -100 where ignored.
    """
    chunks, labels, state = _data()
    true = _run(_whole, chunks, labels, state)
    ours = _run(lambda *args: call(answer, *args), chunks, labels, state)
    # "not <=" rather than ">": a NaN is wrong too.
    if not abs(ours.loss - true.loss) <= 1e-9:
        why = hint(ours.loss, _wrong_losses(chunks, labels, state)) or _ADD_SUMS
        return Verdict(False, f"The loss is {ours.loss:.6f}, it should be {true.loss:.6f}. {why}")
    error = _difference(ours, true)
    if not error <= 1e-9:
        return Verdict(False, _why_gradients_differ(ours, chunks, labels, state, error))
    best = _run(_one_chunk_alive, chunks, labels, state)
    if ours.peak > 1.5 * best.peak:
        return Verdict(
            False,
            f"The gradients are exact, but {ours.peak:,} bytes were alive at once, and one chunk "
            f"needs {best.peak:,}. Some graph outlives its chunk: run the fill under "
            "torch.no_grad(), and start each chunk of the sweep from a detached state.",
        )
    if ours.calls > 2 * _CHUNKS:
        return Verdict(
            False,
            f"The gradients are exact and memory is flat, but the cell ran {ours.calls} times for "
            f"{_CHUNKS} chunks. Keep the states of the fill: {best.calls} runs are enough.",
        )
    return Verdict(
        True,
        f"Exact (largest difference {error:.0e}), {ours.peak:,} bytes alive where the whole run "
        f"takes {true.peak:,}, and {ours.calls} forward runs for {_CHUNKS} chunks.",
    )


_ADD_SUMS = "Add sums over chunks and divide once by the counted labels of all chunks."
_NO_LABEL = "The first chunk counts no label, so its mean is 0/0, not a number."


def _wrong_losses(chunks, labels, state) -> dict[str, float]:
    """Each plausible mistake: its hint and the loss it gives."""
    sums, counted = [], []
    with torch.no_grad():
        cell = Cell()
        for ids, targets in zip(chunks, labels, strict=True):
            logits, state = cell(ids, state)
            sums.append(float(cross_entropy(logits, targets, reduction="sum")))
            counted.append(int((targets != -100).sum()))
    means = [s / n for s, n in zip(sums, counted, strict=True) if n]
    mean_of_means = "That is the mean of the chunks' means"
    unequal = "chunks count different numbers of labels, so their means must not weigh alike"
    return {
        f"{mean_of_means}. {_NO_LABEL} {_ADD_SUMS}": float("nan"),
        f"{mean_of_means}: {unequal}. {_ADD_SUMS}": sum(means) / len(sums),
        f"{mean_of_means} that have a label: {unequal}. {_ADD_SUMS}": sum(means) / len(means),
        f"That adds the chunks' means. {_ADD_SUMS}": sum(means),
        f"That divides by all positions, and -100 does not count. {_ADD_SUMS}": sum(sums)
        / (_CHUNKS * _CHUNK),
        "That is the sum; divide it once by the counted labels of all chunks.": sum(sums),
    }


def _why_gradients_differ(ours: "_Run", chunks, labels, state, error: float) -> str:
    text = f"The loss is equal and the gradients are not (largest difference {error:.1e}). "
    if not ours.grads:
        return text + "No parameter has a gradient: call backward on each chunk's loss."
    if math.isnan(error):
        return (
            "The loss is right and the gradients hold NaN. Is a chunk's sum divided by its own "
            f"count? {_NO_LABEL} Divide by the counted labels of all chunks."
        )
    if _difference(ours, _run(_mean_of_means, chunks, labels, state)) < 1e-9:
        return (
            f"{text}They are those of the mean of the chunks' means: call backward on each chunk's "
            "sum, divided by the counted labels of all chunks."
        )
    if _difference(ours, _run(_detached, chunks, labels, state)) < 1e-9:
        return text + (
            "They equal those of truncated BPTT: no gradient crosses from a chunk to the one "
            "before it. Either the state is detached and its gradient dropped, or the chunks run "
            "forwards, so that the state's gradient comes when its chunk is already finished."
        )
    return text + "Start the backward of each chunk from the gradient of the state it handed on."


class _Run:
    """What one way of doing the step gave and cost."""

    def __init__(self, loss: float, grads: dict, peak: int, calls: int) -> None:
        self.loss, self.grads, self.peak, self.calls = loss, grads, peak, calls


def _run(step: Callable, chunks, labels, state) -> _Run:
    cell = Cell()
    with LiveBytes() as live:
        loss = float(step(cell, list(chunks), list(labels), state.clone()))
    grads = {n: p.grad for n, p in cell.named_parameters() if p.grad is not None}
    return _Run(loss, grads, live.peak, cell.calls)


def _difference(a: _Run, b: _Run) -> float:
    """Largest relative difference over the parameters; infinite where one has no gradient.

    NaN where any gradient holds one: torch's max keeps it, and Python's may lose it.
    """
    if a.grads.keys() != b.grads.keys():
        return float("inf")
    errors = [(a.grads[n] - g).norm() / g.norm() for n, g in b.grads.items()]
    return float(torch.stack(errors).max())


def _data() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, _VOCAB, (_CHUNKS * _CHUNK,), generator=generator)
    targets = pad(ids[1:], (0, 1), value=-100)
    targets[: _CHUNK + 3] = -100  # a prompt: the first chunk counts no label
    state = torch.zeros(_WIDTH, dtype=torch.float64)
    return list(ids.split(_CHUNK)), list(targets.split(_CHUNK)), state


def _count(labels: list[torch.Tensor]) -> torch.Tensor:
    return sum((t != -100).sum() for t in labels)


def _whole(cell, chunks, labels, state) -> torch.Tensor:
    loss = cross_entropy(cell(torch.cat(chunks), state)[0], torch.cat(labels))
    loss.backward()
    return loss.detach()


def _detached(cell, chunks, labels, state) -> torch.Tensor:
    total, count = 0, _count(labels)
    for ids, targets in zip(chunks, labels, strict=True):
        logits, state = cell(ids, state.detach())
        term = cross_entropy(logits, targets, reduction="sum") / count
        term.backward()
        total += term.detach()
    return total


def _mean_of_means(cell, chunks, labels, state) -> torch.Tensor:
    total = 0
    for ids, targets in zip(chunks, labels, strict=True):
        logits, state = cell(ids, state)
        total = total + cross_entropy(logits, targets) / len(chunks)
    total.backward()
    return total.detach()


def _one_chunk_alive(cell, chunks, labels, state) -> torch.Tensor:
    count, states = _count(labels), [state]
    with torch.no_grad():
        for ids in chunks[:-1]:
            states.append(cell(ids, states[-1])[1])
    total, grad = 0, torch.zeros_like(state)
    for ids, targets, start in zip(chunks[::-1], labels[::-1], states[::-1], strict=True):
        start.requires_grad_()
        logits, end = cell(ids, start)
        term = cross_entropy(logits, targets, reduction="sum") / count
        torch.autograd.backward((term, end), (None, grad))
        grad, total = start.grad, total + term.detach()
    return total
