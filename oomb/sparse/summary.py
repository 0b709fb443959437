"""The vector that stands for a page when pages are selected, and the one that asks for it.

`mean` scores a page by its mean key. `minmax` bounds the score of every key in the page from above:
in each dimension a query meets the page's largest number where its own is positive, the smallest
where it is negative. Both are one dot product.
"""

from __future__ import annotations

import torch

from oomb.config import Summary


def summary_width(dim: int, kind: Summary) -> int:
    """Numbers in a summary of keys of `dim` numbers."""
    return dim if kind == "mean" else 2 * dim


def summarise(keys: torch.Tensor, kind: Summary) -> torch.Tensor:
    """Summaries of pages.

    Args:
        keys: [..., P, D], all keys of each page.
        kind: `mean` or `minmax`.

    Returns:
        [..., W] in the dtype of the keys; see `summary_width`.
    """
    if kind == "mean":
        return keys.mean(-2, dtype=_wide(keys)).to(keys.dtype)
    return torch.cat([keys.amax(-2), keys.amin(-2)], -1)


def asked(q: torch.Tensor, groups: int, kind: Summary) -> torch.Tensor:
    """What queries hold against summaries.

    Args:
        q: [H, N, D].
        groups: key/value heads G; the query heads that share one ask with their sum.
        kind: `mean` or `minmax`.

    Returns:
        [G, N, W] in the dtype of q.
    """
    q = q.unflatten(0, (groups, -1)).sum(1, dtype=_wide(q)).to(q.dtype)
    return q if kind == "mean" else torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
