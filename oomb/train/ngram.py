"""Interpolated modified Kneser-Ney n-gram model: the baseline the demo model must beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class _Level:
    """One order of the model: counts of n-grams, and per context what discounting takes away."""

    def __init__(self, grams: Ints, counts: Ints, vocab_size: int) -> None:
        # grams [G] are base-vocab_size numbers, sorted; the last digit is the predicted token.
        self.grams, self.counts, self.vocab_size = grams, counts, vocab_size
        self.discounts = _discounts(counts)
        contexts = grams // vocab_size
        self.contexts, first = np.unique(contexts, return_index=True)
        self.totals = np.add.reduceat(counts, first)
        removed = self.discounts[np.minimum(counts, 3)]
        # What the discounts remove from a context is the weight of the next shorter context.
        self.backoff = np.add.reduceat(removed, first) / self.totals

    def probability(self, context: Ints, token: Ints, lower: NDArray[np.float64]) -> NDArray:
        """Interpolate this order with `lower`; a context never seen leaves `lower` alone."""
        row, seen = _find(self.contexts, context)
        gram, found = _find(self.grams, context * self.vocab_size + token)
        count = np.where(found, self.counts[gram], 0)
        own = np.maximum(count - self.discounts[np.minimum(count, 3)], 0.0) / self.totals[row]
        return np.where(seen, own + self.backoff[row] * lower, lower)


class KneserNey:
    """Modified Kneser-Ney with interpolation (Chen and Goodman 1999, section 3).

    The highest order counts n-grams; each lower order counts in how many different left contexts
    an n-gram appears, and the lowest is interpolated with the uniform distribution, so every
    token has a probability above zero and the probabilities of a context sum to 1.

    Args:
        tokens: training tokens [N], each in [0, vocab_size).
        vocab_size: number of token ids, seen or not.
        order: length n of the longest n-gram; vocab_size**order must fit in 63 bits.

    Raises:
        ValueError: fewer tokens than `order`, or n-grams that do not fit in 63 bits.
    """

    def __init__(self, tokens: Ints, vocab_size: int, order: int = 3) -> None:
        tokens = np.asarray(tokens, dtype=np.int64)
        if len(tokens) < order:
            raise ValueError(f"tokens must hold at least order={order} ids; got {len(tokens)}")
        if vocab_size**order >= 2**63:
            raise ValueError(f"vocab_size**order must be below 2**63; got {vocab_size}**{order}")
        self.vocab_size, self.order = vocab_size, order
        grams, counts = np.unique(_ngrams(tokens, order, vocab_size), return_counts=True)
        self.levels = [_Level(grams, counts, vocab_size)]
        for n in range(order - 1, 0, -1):
            # Dropping the first digit of every distinct (n+1)-gram counts distinct left contexts.
            grams, counts = np.unique(grams % vocab_size**n, return_counts=True)
            self.levels.insert(0, _Level(grams, counts, vocab_size))

    def probability(self, context: Ints, token: Ints) -> NDArray[np.float64]:
        """P(token | context) for each row: context [M, order-1] of preceding tokens, token [M]."""
        context = np.asarray(context, dtype=np.int64).reshape(len(token), self.order - 1)
        token = np.asarray(token, dtype=np.int64)
        p = np.full(len(token), 1.0 / self.vocab_size)
        key = np.zeros(len(token), dtype=np.int64)
        for n, level in enumerate(self.levels):
            if n:
                key = key + context[:, -n] * self.vocab_size ** (n - 1)
            p = level.probability(key, token, p)
        return p

    def loss(self, tokens: Ints) -> float:
        """Mean of -log P (nats) over tokens[order-1:], each given the order-1 tokens before it."""
        tokens = np.asarray(tokens, dtype=np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(tokens, self.order)
        return float(-np.log(self.probability(windows[:, :-1], windows[:, -1])).mean())


def _ngrams(tokens: Ints, n: int, vocab_size: int) -> Ints:
    """Every run of n tokens as one number: [N] -> [N - n + 1]."""
    grams = np.zeros(len(tokens) - n + 1, dtype=np.int64)
    for i in range(n):
        grams = grams * vocab_size + tokens[i : len(tokens) - n + 1 + i]
    return grams


def _find(table: Ints, keys: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Row of each key in the sorted table, and whether it is there."""
    row = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return row, table[row] == keys


def _discounts(counts: Ints) -> NDArray[np.float64]:
    """Discounts for counts 0, 1, 2 and 3 or more, from how many n-grams have counts 1 to 4."""
    n1, n2, n3, n4 = (int((counts == c).sum()) for c in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return np.array([0.0, 0.5, 0.5, 0.5])  # too little text to estimate them
    y = n1 / (n1 + 2 * n2)
    estimate = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    # A discount may not be negative, nor take more than the count it is taken from.
    return np.clip(estimate, 0.0, [0.0, 1.0, 2.0, 3.0])
