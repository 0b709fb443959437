"""The merge in one pass over memory; written out in PyTorch it takes six."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, a_ptr, a_lse_ptr, b_ptr, b_lse_ptr,
    stride_ob, stride_oh, stride_on, stride_ab, stride_ah, stride_an, stride_bb, stride_bh,
    stride_bn, stride_alb, stride_alh, stride_aln, stride_blb, stride_blh, stride_bln,
    N, H, ROWS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Outputs [B, H, N, DIM], any strides and dtypes; lse [B, H, N] dense, fp64; theirs any."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, D)
    there = i < N
    tokens = i.to(tl.int64)
    a_lse_at = a_lse_ptr + row * stride_alb + h * stride_alh + tokens * stride_aln
    b_lse_at = b_lse_ptr + row * stride_blb + h * stride_blh + tokens * stride_bln
    a_lse = tl.load(a_lse_at, mask=there, other=0.0).to(tl.float64)
    b_lse = tl.load(b_lse_at, mask=there, other=0.0).to(tl.float64)
    high = tl.maximum(a_lse, b_lse)
    high = tl.where(high == float("-inf"), 0.0, high)
    a_weight, b_weight = tl.exp(a_lse - high), tl.exp(b_lse - high)
    both = a_weight + b_weight
    seen = both > 0.0
    both = tl.where(seen, both, 1.0)
    lse = tl.where(seen, high + tl.log(both), float("-inf"))
    tl.store(lse_ptr + (row * H + h) * N + i, lse, mask=there)
    inside = there[:, None] & (dims < DIM)[None, :]
    tokens = tokens[:, None]
    # Where a part weighs nothing its output may be NaN.
    a = tl.load(
        a_ptr + row * stride_ab + h * stride_ah + tokens * stride_an + dims[None, :],
        mask=inside & (a_weight > 0.0)[:, None], other=0.0,
    )  # fmt: skip
    b = tl.load(
        b_ptr + row * stride_bb + h * stride_bh + tokens * stride_bn + dims[None, :],
        mask=inside & (b_weight > 0.0)[:, None], other=0.0,
    )  # fmt: skip
    wide = tl.float64 if out_ptr.dtype.element_ty == tl.float64 else tl.float32
    a_weight = (a_weight / both).to(wide)[:, None]
    b_weight = (b_weight / both).to(wide)[:, None]
    out = a.to(wide) * a_weight + b.to(wide) * b_weight
    tl.store(
        out_ptr + row * stride_ob + h * stride_oh + tokens * stride_on + dims[None, :],
        out.to(out_ptr.dtype.element_ty), mask=inside,
    )  # fmt: skip


def fused_merge(
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge` on a GPU."""
    rows, heads, tokens, dim = first[0].shape
    a, b = (x if x.stride(3) == 1 else x.contiguous() for x, _ in (first, second))
    out = a.new_empty(rows, tokens, heads, dim, dtype=dtype).transpose(1, 2)
    lse = a.new_empty(rows, heads, tokens, dtype=torch.float64)
    _merge_kernel[(triton.cdiv(tokens, ROWS), heads, rows)](
        out, lse, a, first[1], b, second[1],
        *out.stride()[:3], *a.stride()[:3], *b.stride()[:3],
        *first[1].stride(), *second[1].stride(),
        tokens, heads, ROWS=ROWS, D=triton.next_power_of_2(dim), DIM=dim,
    )  # fmt: skip
    return out, lse
