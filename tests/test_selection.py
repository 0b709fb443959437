"""Page summaries, votes and Top-K, against loops over single tokens in fp64."""

import math

import pytest
import torch

from oomb.config import SparseConfig
from oomb.sparse import asked, page_votes, select_pages, summarise, summary_width, top_pages, votes

HEADS, GROUPS, DIM, PAGE = 6, 2, 8, 4
LOW = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_layer(tokens, pages, dtype=torch.float64):
    """q [H, N, D] and keys [G, n, P, D]."""
    q = torch.randn(HEADS, tokens, DIM, dtype=torch.float64).to(dtype)
    return q, torch.randn(GROUPS, pages, PAGE, DIM, dtype=torch.float64).to(dtype)


def score(q, page, kind):
    """Of one query [D] for one page [P, D], a dimension at a time."""
    total = 0.0
    for dim in range(DIM):
        column = [float(x) for x in page[:, dim]]
        if kind == "mean":
            total += float(q[dim]) * float(page[:, dim].double().mean().to(page.dtype))
        else:
            total += max(float(q[dim]) * max(column), float(q[dim]) * min(column))
    return total


def naive_votes(q, keys, kind, block, per_head):
    """[sets][blocks][pages], by the definition."""
    tokens, pages = q.shape[1], keys.shape[1]
    result = torch.zeros(GROUPS, math.ceil(tokens / block), pages, dtype=torch.float64)
    share = HEADS // GROUPS
    for group in range(GROUPS):
        for token in range(tokens):
            heads = q[group * share : (group + 1) * share, token]
            asks = heads.double().sum(0).to(q.dtype)
            scores = [score(asks, keys[group, page], kind) for page in range(pages)]
            top = max(scores)
            weights = [math.exp(x - top) for x in scores]
            for page in range(pages):
                result[group, token // block, page] += weights[page] / sum(weights)
    return result if per_head else result.sum(0, keepdim=True)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["mean", "minmax"])
@pytest.mark.parametrize(("tokens", "block"), [(12, 4), (11, 4), (3, 4), (13, 13), (1, 1)])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_votes_are_the_definition(tokens, block, kind, per_head, dtype):
    q, keys = random_layer(tokens, 7, dtype)
    summaries = summarise(keys, kind)
    assert summaries.shape == (GROUPS, 7, summary_width(DIM, kind))
    found = page_votes(asked(q, GROUPS, kind), summaries, block, per_head=per_head)
    expected = naive_votes(q, keys, kind, block, per_head)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def test_minmax_bounds_every_key():
    q, keys = random_layer(5, 9)
    bounds = asked(q, GROUPS, "minmax") @ summarise(keys, "minmax").mT  # [G, N, n]
    single = torch.einsum("gnd,gpkd->gnpk", asked(q, GROUPS, "mean"), keys)
    assert (bounds >= single.amax(-1) - 1e-12).all()


@pytest.mark.parametrize("workspace", [1, 2 * 9 * 3, 2 * 9 * 4, 2 * 9 * 9, 1 << 24])
def test_the_workspace_bounds_what_is_alive_and_changes_nothing(workspace, monkeypatch):
    """One token at a time, parts of a block, a block, two blocks, everything."""
    q, keys = random_layer(19, 9)
    queries, summaries = asked(q, GROUPS, "mean"), summarise(keys, "mean")
    expected = page_votes(queries, summaries, 4, per_head=True)
    monkeypatch.setattr(votes, "WORKSPACE", workspace)
    seen, dot = [], votes._dot
    monkeypatch.setattr(votes, "_dot", lambda *a: seen.append(dot(*a)) or seen[-1])
    torch.testing.assert_close(page_votes(queries, summaries, 4, per_head=True), expected)
    assert all(scores.numel() <= max(workspace, 2 * 9) for scores in seen)


@pytest.mark.parametrize(("first", "recent"), [(0, 0), (1, 0), (0, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("budget", [3, 5, 12])
def test_kept_pages_are_chosen_and_the_rest_by_votes(budget, first, recent):
    given = torch.rand(2, 6, 12, dtype=torch.float64)
    found = top_pages(given.clone(), budget, keep_first=first, keep_recent=recent)
    assert found.dtype == torch.int32
    for have, scores in zip(found.flatten(0, 1).tolist(), given.flatten(0, 1), strict=True):
        kept = {*range(first), *range(12 - recent, 12)}
        others = sorted((p for p in range(12) if p not in kept), key=lambda p: -float(scores[p]))
        assert have == sorted(kept | set(others[: budget - len(kept)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_of_equals_the_lower_page_wins(dtype):
    flat = torch.zeros(1, 3, 5000, dtype=dtype)
    assert top_pages(flat, 4).tolist() == [[[0, 1, 2, 3]] * 3]
    some = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.5, 2.0], dtype=dtype)
    assert top_pages(some.clone(), 2).tolist() == [1, 3]
    assert top_pages(some.clone(), 4).tolist() == [0, 1, 3, 6]
    assert top_pages(some.clone(), 3, keep_recent=1, keep_first=1).tolist() == [0, 1, 6]


def test_pages_with_the_same_keys_tie_and_the_lower_is_chosen():
    q, keys = random_layer(PAGE, 6, torch.bfloat16)
    keys[:] = -q.view(GROUPS, -1, PAGE, DIM).mean((1, 2))[:, None, None]  # nobody looks for these
    keys[:, [1, 3, 5]] *= -1
    chosen = select_pages(q, summarise(keys, "mean"), SparseConfig(budget=2), page_size=PAGE)
    assert chosen.pages.tolist() == [[[1, 3]]]


@pytest.mark.parametrize("heads", ["shared", "kv_head"])
@pytest.mark.parametrize("granularity", ["query_page", "chunk"])
@pytest.mark.parametrize("kind", ["mean", "minmax"])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_selection_is_top_k_of_the_definition(budget, kind, granularity, heads):
    q, keys = random_layer(11, 12)
    config = SparseConfig(budget=budget, summary=kind, granularity=granularity, heads=heads)
    chosen = select_pages(q, summarise(keys, kind), config, page_size=PAGE)
    block = PAGE if granularity == "query_page" else 11
    expected = naive_votes(q, keys, kind, block, heads == "kv_head")
    order = expected.argsort(-1, descending=True)[..., :budget].sort(-1).values
    assert torch.equal(chosen.pages.long(), order)
    assert (chosen.block, chosen.count) == (block, 12)
    again = select_pages(q, summarise(keys, kind), config, page_size=PAGE)
    assert torch.equal(again.pages, chosen.pages)


@pytest.mark.parametrize("pages", [0, 1, 3])
def test_no_more_pages_than_the_budget_is_dense(pages):
    q, keys = random_layer(5, max(pages, 1))
    summaries = summarise(keys, "mean")[:, :pages]
    assert select_pages(q, summaries, SparseConfig(budget=3), page_size=PAGE) is None


def test_choosing_has_no_gradient():
    q, keys = random_layer(5, 6)
    summaries = summarise(keys.requires_grad_(), "mean")
    chosen = select_pages(q.requires_grad_(), summaries, SparseConfig(budget=2), page_size=PAGE)
    assert not chosen.pages.requires_grad and chosen.pages.grad_fn is None


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
        ({"budget": 2.0}, TypeError, "budget must be a positive integer, got 2.0"),
        ({"budget": True}, TypeError, "budget must be a positive integer, got True"),
        ({"keep_first": -1}, ValueError, "keep_first must be at least 0, got -1"),
        ({"keep_recent": None}, TypeError, "keep_recent must be an integer of 0 or more, got None"),
        (
            {"budget": 3, "keep_first": 2, "keep_recent": 2},
            ValueError,
            r"keep_first \+ keep_recent must be at most budget=3, got 2 \+ 2; keep fewer",
        ),
        ({"summary": "max"}, ValueError, "summary must be one of 'mean', 'minmax', got 'max'"),
        ({"granularity": "token"}, ValueError, "granularity must be one of 'query_page', 'chunk'"),
        ({"heads": "head"}, ValueError, "heads must be one of 'shared', 'kv_head', got 'head'"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(settings, error, said):
    with pytest.raises(error, match=said):
        SparseConfig(**settings)
