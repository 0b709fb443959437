"""Adding a part to the attention state, by log-sum-exp."""

from __future__ import annotations

import torch


def merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add a part to the state in place.

    Args:
        out: state [B, H, N, D] (a view is fine).
        lse: state [B, H, N] in fp64, since every merge rounds it once and the output is
            normalised by it; -inf where nothing was added yet.
        part_out: the part's output [B, H, N, D], any float dtype.
        part_lse: the part's log-sum-exp [B, H, N]; -inf where it holds no visible key.
    """
    if out.device.type == "cuda":
        from oomb.attention.merge_kernel import fused_merge  # Triton comes with torch's CUDA builds

        fused_merge(out, lse, part_out, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    # A query that has seen nothing yet has total = -inf; exp(-inf - 0) is the 0 it should weigh.
    safe = total.masked_fill(total == float("-inf"), 0.0)
    out.mul_(torch.exp(lse - safe).to(out.dtype)[..., None])
    out.addcmul_(part_out.to(out.dtype), torch.exp(part_lse - safe).to(out.dtype)[..., None])
    lse.copy_(total)
