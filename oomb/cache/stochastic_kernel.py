"""Stochastic rounding in one pass over memory; written out in PyTorch it takes six."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["seed"])
def _round_kernel(x_ptr, out_ptr, stride_x, stride_out, numbers, seed, BLOCK: tl.constexpr):
    """x [2, numbers], fp32, to bf16 out; numbers of a row lie side by side."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < numbers
    x = tl.load(x_ptr + row * stride_x + at, mask=there, other=0.0)
    chance = tl.randint(seed, tl.program_id(1) * numbers + at) & 0xFFFF
    bits = x.to(tl.uint32, bitcast=True)
    up = (bits + chance.to(tl.uint32)) & 0xFFFF0000
    finite = (bits & 0x7F800000) != 0x7F800000
    x = tl.where(finite, up.to(tl.float32, bitcast=True), x)
    tl.store(out_ptr + row * stride_out + at, x.to(out_ptr.dtype.element_ty), mask=there)


def fused_store(x: torch.Tensor, out: torch.Tensor, seed: int) -> None:
    """Round x [K|V, tokens, heads, dim] into `out`, bf16.

    Args:
        x: fp32; K and V each without gaps.
        out: bf16 of its shape; the same.
        seed: which random numbers, below 2^63.
    """
    numbers = x[0].numel()
    _round_kernel[(triton.cdiv(numbers, BLOCK), len(x))](
        x, out, x.stride(0), out.stride(0), numbers, seed, BLOCK=BLOCK
    )
