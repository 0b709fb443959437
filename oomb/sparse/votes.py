"""Votes of query pages for history pages, and the pages that win.

Every token of a query page spreads one vote per key/value head over all complete pages of history,
by the softmax of its score for each. A page's votes are summed over the query page's tokens.
"""

from __future__ import annotations

import torch

WORKSPACE = 1 << 24
"""Scores alive at a time, whatever the context: 64 MiB in fp32, and as much for their softmax."""


def page_votes(
    queries: torch.Tensor, summaries: torch.Tensor, block: int, *, per_head: bool = False
) -> torch.Tensor:
    """Votes for each page, by blocks of queries.

    Args:
        queries: [G, N, W], see `oomb.sparse.asked`.
        summaries: [G, n, W] of n pages.
        block: queries per block; the last block may be shorter.
        per_head: whether heads vote apart.

    Returns:
        [G or 1, blocks, n] in fp32 (fp64 for fp64).
    """
    pages = summaries.shape[0] * summaries.shape[1]
    tokens = max(1, WORKSPACE // pages)
    whole = queries.shape[1] // block * block
    pieces = [piece.unflatten(1, (-1, block)) for piece in _cut(queries[:, :whole], block, tokens)]
    if whole < queries.shape[1]:
        pieces.append(queries[:, None, whole:])
    votes = [_votes(piece, summaries, min(block, tokens)) for piece in pieces]
    heads = torch.cat(votes, 1)
    return heads if per_head else heads.sum(0, keepdim=True)


def top_pages(
    votes: torch.Tensor, budget: int, *, keep_first: int = 0, keep_recent: int = 0
) -> torch.Tensor:
    """The pages with the most votes; of equals the lower.

    Args:
        votes: [..., n], at least `budget` pages; overwritten.
        budget: pages chosen, kept ones included.
        keep_first: pages at the beginning that are chosen whatever their votes.
        keep_recent: pages at the end.

    Returns:
        int32 [..., budget], page numbers in rising order.
    """
    votes[..., :keep_first] = float("inf")
    votes[..., votes.shape[-1] - keep_recent :] = float("inf")
    order = votes.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    return order.sort(dim=-1).values.to(torch.int32)


def _cut(queries: torch.Tensor, block: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Pieces of whole blocks of at most `tokens` queries, but at least one block each."""
    if not queries.shape[1]:
        return ()
    return queries.split(max(1, tokens // block) * block, dim=1)


def _votes(queries: torch.Tensor, summaries: torch.Tensor, tokens: int) -> torch.Tensor:
    """queries [G, blocks, t, W] -> votes [G, blocks, n], `tokens` of each block at a time."""
    blocks = queries.shape[1]
    total = None
    for some in queries.split(tokens, dim=2):
        scores = _dot(some.flatten(1, 2), summaries)
        votes = scores.softmax(-1).unflatten(1, (blocks, -1)).sum(2)
        total = votes if total is None else total.add_(votes)
    return total


def _dot(queries: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
    """[G, t, W] x [G, n, W] -> [G, t, n], summed in fp32 (fp64 for fp64)."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    if queries.dtype == wide:
        return torch.bmm(queries, summaries.mT)
    if queries.device.type == "cuda":
        return torch.bmm(queries, summaries.mT, out_dtype=wide)
    return torch.bmm(queries.to(wide), summaries.mT.to(wide))  # products of halves fit fp32
