"""The merge in one pass over memory; written out in PyTorch it takes six."""

import torch
import triton
import triton.language as tl

ROWS = 32


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    stride_ob, stride_oh, stride_on, stride_lb, stride_lh,
    stride_pb, stride_ph, stride_pn, stride_mb, stride_mh, stride_mn,
    N, ROWS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """out, part [B, H, N, DIM]; lse fp64, part_lse [B, H, N]."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, D)
    there = i < N
    lse_at = lse_ptr + b * stride_lb + h * stride_lh + i
    part_lse_at = part_lse_ptr + b * stride_mb + h * stride_mh + i.to(tl.int64) * stride_mn
    lse = tl.load(lse_at, mask=there, other=0.0)
    part_lse = tl.load(part_lse_at, mask=there, other=0.0).to(tl.float64)
    high = tl.maximum(lse, part_lse)
    high = tl.where(high == float("-inf"), 0.0, high)
    old, new = tl.exp(lse - high), tl.exp(part_lse - high)
    both = old + new
    seen = both > 0.0
    both = tl.where(seen, both, 1.0)
    tl.store(lse_at, tl.where(seen, high + tl.log(both), float("-inf")), mask=there)
    inside = there[:, None] & (dims < DIM)[None, :]
    tokens = i.to(tl.int64)[:, None]
    at = out_ptr + b * stride_ob + h * stride_oh + tokens * stride_on + dims[None, :]
    part_at = part_ptr + b * stride_pb + h * stride_ph + tokens * stride_pn + dims[None, :]
    out = tl.load(at, mask=inside, other=0.0)
    # Where a part weighs nothing its output may be NaN.
    part = tl.load(part_at, mask=inside & (new > 0.0)[:, None], other=0.0).to(out.dtype)
    old = (old / both).to(out.dtype)[:, None]
    new = (new / both).to(out.dtype)[:, None]
    tl.store(at, out * old + part * new, mask=inside)


def fused_merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """`merge` on a GPU; out, lse and part_out have adjacent numbers in their last dimension."""
    rows, heads, tokens, dim = out.shape
    part_out = part_out if part_out.stride(3) == 1 else part_out.contiguous()
    _merge_kernel[(triton.cdiv(tokens, ROWS), heads, rows)](
        out, lse, part_out, part_lse,
        *out.stride()[:3], *lse.stride()[:2], *part_out.stride()[:3], *part_lse.stride(),
        tokens, ROWS=ROWS, D=triton.next_power_of_2(dim), DIM=dim,
    )  # fmt: skip
