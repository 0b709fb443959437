"""Two parts of the attention state made into one, by log-sum-exp."""

from __future__ import annotations

import torch

Part = tuple[torch.Tensor, torch.Tensor]
"""Output [B, H, N, D], normalised, and log-sum-exp [B, H, N] of attention over some keys."""


def merge(first: Part, second: Part, dtype: torch.dtype) -> Part:
    """Attention over the keys of both parts.

    Args:
        first: a part; lse is -inf where a query sees none of its keys.
        second: another.
        dtype: of the output; fp32 or fp64 where more parts follow.

    Returns:
        The output in `dtype`, and lse in fp64, since every merge rounds it once and the output is
        normalised by it.
    """
    if first[0].device.type == "cuda":
        from oomb.attention.merge_kernel import fused_merge  # Triton comes with torch's CUDA builds

        return fused_merge(first, second, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    lse = torch.logaddexp(first[1].double(), second[1].double())
    # A query that sees nothing of either has lse -inf; exp(-inf - 0) is the 0 it should weigh.
    safe = lse.masked_fill(lse == float("-inf"), 0.0)
    weights = [torch.exp(part[1] - safe).to(wide)[..., None] for part in (first, second)]
    out = first[0].to(wide) * weights[0]
    out.addcmul_(second[0].to(wide), weights[1])
    return out.to(dtype), lse
