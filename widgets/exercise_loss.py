"""Exercise: one loss from many chunks, with ignored labels."""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, pad

from oomb.profiling import LiveBytes
from oomb_widgets.verdict import Verdict, call, hint

_IGNORED = -100


def judge_chunked_loss(answer: Callable) -> Verdict:
    """`answer(logits, labels, chunk)` equals the mean over all counted labels of the sequence.

    Logits are [T, V]; labels are [T], unshifted: position t predicts labels[t + 1].
    """
    logits, labels = _sequence(tokens=30, vocab=13)
    true = _whole(logits, labels)
    passed = []
    for chunk in (30, 15, 10, 7, 1):
        chunks = -(-30 // chunk)
        got = float(call(answer, logits, labels, chunk))
        if abs(got - true) <= 1e-9:
            passed.append(chunks)
            continue
        why = hint(got, _wrong(logits, labels, chunk)) or "Compare it with the whole sequence."
        so_far = f"Right with {_list(passed)}, wrong" if passed else "Wrong"
        return Verdict(
            False,
            f"{so_far} with {_list([chunks])}: yours {got:.6f}, whole sequence {true:.6f}. {why}",
        )
    return _cost(answer)


def _wrong(logits: torch.Tensor, labels: torch.Tensor, chunk: int) -> dict[str, float]:
    """Each plausible mistake: its hint and the loss it gives."""
    shifted = pad(labels[1:], (0, 1), value=_IGNORED)
    twice = pad(labels[2:], (0, 2), value=_IGNORED)
    pieces = list(zip(logits.split(chunk), shifted.split(chunk), strict=True))
    counted = [int((t != _IGNORED).sum()) for _, t in pieces]
    sums = [float(cross_entropy(x, t, reduction="sum")) for x, t in pieces]
    means = [s / n for s, n in zip(sums, counted, strict=True) if n]
    nan = float("nan")
    cut_first = [
        (x[:-1], t[1:]) for x, t in zip(logits.split(chunk), labels.split(chunk), strict=True)
    ]
    cut_total = sum(int((t != _IGNORED).sum()) for _, t in cut_first)
    cut_sum = sum(float(cross_entropy(x, t, reduction="sum")) for x, t in cut_first)
    mean_of_means = (
        "That is the mean of the chunks' means. Chunks hold different numbers of counted labels, "
        "so their means must not weigh alike: add sums, then divide once."
    )
    return {
        mean_of_means: sum(means) / len(pieces),
        mean_of_means + " ": sum(means) / len(means),
        "Is it the mean of the chunks' means? A chunk whose labels are all ignored has a mean of "
        "0/0. Add sums, then divide once.": nan,
        "That adds the chunks' means without weighing them: add sums, then divide once.": sum(
            means
        ),
        "That divides by all positions. Only labels other than -100 count.": sum(sums)
        / len(labels),
        "That divides by all positions but the last. Only labels other than -100 count.": sum(sums)
        / (len(labels) - 1),
        "That is the sum; divide by the counted labels of the whole sequence.": sum(sums),
        "The labels are not shifted: position t predicts labels[t + 1].": float(
            cross_entropy(logits, labels)
        ),
        "The labels are shifted twice: position t predicts labels[t + 1], not t + 2.": float(
            cross_entropy(logits, twice)
        ),
        "The labels are shifted after cutting: the last position of every chunk lost its label, "
        "which is the first of the next chunk. Shift first, then cut.": cut_sum / max(cut_total, 1),
        "The sum lacks the label at each cut: shift first, then cut.": cut_sum
        / int((shifted != _IGNORED).sum()),
    }


def _cost(answer: Callable) -> Verdict:
    """Right is not enough: the work tensors must be those of one chunk."""
    logits, labels = _sequence(tokens=1024, vocab=64)
    with torch.no_grad():
        with LiveBytes() as ours:
            call(answer, logits, labels, 64)
        with LiveBytes() as whole:
            _whole(logits, labels)
    if ours.peak > whole.peak / 2:
        return Verdict(
            False,
            f"The value is right, but {ours.peak:,} bytes were alive at once; the whole sequence "
            f"takes {whole.peak:,}. Compute one chunk's loss, then let go of it.",
        )
    return Verdict(
        True,
        "Right with 1, 2, 3, 5 and 30 chunks, one of them without a counted label; at most "
        f"{ours.peak:,} bytes alive, where the whole sequence takes {whole.peak:,}.",
    )


def _sequence(tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[: tokens // 4] = _IGNORED  # a prompt: with small chunks, a chunk counts no label at all
    labels[tokens // 2] = _IGNORED
    return logits, labels


def _whole(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(cross_entropy(logits[:-1], labels[1:]))


def _list(chunks: list[int]) -> str:
    many = ", ".join(map(str, chunks))
    return f"{many} chunk" + ("" if chunks == [1] else "s")
