"""The pages that the queries of one read see."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb.config import SparseConfig
from oomb.sparse.summary import asked
from oomb.sparse.votes import page_votes, top_pages


@dataclass(frozen=True)
class Selection:
    """History pages chosen for blocks of queries, the last of which may be shorter.

    Attributes:
        pages: int32 [G or 1, blocks, K] on the model's device, numbers of the row's logical pages
            counted from the document's first, in rising order; one set for all heads, or one for
            each key/value head.
        block: queries per block.
        count: complete pages there were to choose from.
    """

    pages: torch.Tensor
    block: int
    count: int


@torch.no_grad()
def select_pages(
    q: torch.Tensor, summaries: torch.Tensor, config: SparseConfig, *, page_size: int
) -> Selection | None:
    """Choose the pages that queries will read.

    A page's votes are the softmax over all complete pages of (q summed over the heads that share a
    key/value head) . summary, unscaled, summed over heads and the block's tokens. No gradient flows
    through the choice.

    Args:
        q: [H, N, D], queries of one row, from the first that reads history.
        summaries: [G, n, W] of the n complete pages of their document's history.
        config: how to choose.
        page_size: tokens per page.

    Returns:
        The selection, or None where the budget covers every page: attention is dense then.
    """
    heads, count, _ = summaries.shape
    if count <= config.budget:
        return None
    block = page_size if config.granularity == "query_page" else q.shape[1]
    queries = asked(q, heads, config.summary)
    votes = page_votes(queries, summaries, block, per_head=config.heads == "kv_head")
    pages = top_pages(
        votes, config.budget, keep_first=config.keep_first, keep_recent=config.keep_recent
    )
    return Selection(pages, block, count)
