"""The 3-gram baseline: a proper distribution, and the textbook's numbers on a tiny text."""

import math

import numpy as np
import pytest

from oomb.train.ngram import KneserNey


@pytest.fixture(scope="module")
def tokens():
    """A text of 5,000 tokens with Zipf-like counts, where id 29 never appears."""
    weights = 1 / np.arange(1, 30)
    return np.random.default_rng(0).choice(29, 5000, p=weights / weights.sum())


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_sum_to_one_in_every_context(tokens, order):
    model = KneserNey(tokens, 30, order)
    rng = np.random.default_rng(1)
    contexts = [tokens[i : i + order - 1] for i in (0, 100, 4000)]  # seen
    contexts += [rng.integers(0, 30, order - 1), np.full(order - 1, 29)]  # perhaps not, never
    for context in contexts:
        p = model.probability(np.tile(context, (30, 1)), np.arange(30))
        assert p.min() > 0
        assert p.sum() == pytest.approx(1.0, abs=1e-12)


def test_probabilities_by_hand():
    """Bigrams of a b a b a c, discounts all 1/2 (too few counts to estimate them).

    Counts ab 2, ba 2, ac 1. Left contexts: b 1 (a), a 1 (b), c 1 (a), so P1 interpolates 1/2 of
    each 1/3 with the uniform: P1(x) = (1 - 1/2) / 3 + 1/2 * 1/3 = 1/3 for every x.
    P(b | a) = (2 - 1/2) / 3 + (1/2 + 1/2) / 3 * 1/3 = 11/18.
    """
    model = KneserNey(np.array([0, 1, 0, 1, 0, 2]), 3, order=2)
    p = model.probability(np.array([[0], [0], [0], [2]]), np.array([1, 2, 0, 1]))
    assert p == pytest.approx([11 / 18, 1 / 6 + 1 / 9, 1 / 9, 1 / 3])


def test_lower_orders_count_contexts_not_occurrences():
    """Francisco follows only San, however often: it is unlikely after anything else."""
    san, francisco, the, others = 0, 1, 2, list(range(3, 13))
    text = [san, francisco] * 40 + [word for other in others for word in (the, other, other, the)]
    model = KneserNey(np.array(text), 14, order=2)
    after_unseen = model.probability(np.full((2, 1), 13), np.array([francisco, the]))
    assert after_unseen[0] < after_unseen[1] / 3


def test_loss_is_the_mean_over_tokens_with_a_whole_context(tokens):
    model = KneserNey(tokens, 30)
    held_out = np.array([3, 1, 4, 1, 5])
    by_hand = [
        -math.log(model.probability(held_out[None, i - 2 : i], held_out[i : i + 1])[0])
        for i in (2, 3, 4)
    ]
    assert model.loss(held_out) == pytest.approx(sum(by_hand) / 3)


def test_longer_contexts_help_on_text_that_has_them():
    period = np.tile([0, 1, 0, 2, 0, 3], 200)
    losses = [KneserNey(period, 4, order).loss(period[:300]) for order in (1, 2, 3)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.05


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"at least order=3 ids; got 2"):
        KneserNey(np.array([1, 2]), 5)
    with pytest.raises(ValueError, match=r"below 2\*\*63; got 3000000\*\*3"):
        KneserNey(np.arange(10), 3_000_000)
