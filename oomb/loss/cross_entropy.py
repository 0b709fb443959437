"""Cross entropy and its gradient in one kernel, over logits that the gradient then replaces.

A row's softmax is computed in fp32, in two passes over its logits: maximum and sum, then the
gradient. Importing this needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oomb.batch import IGNORED

BLOCK = 16384
WARPS = 16


def cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool = True
) -> torch.Tensor:
    """Each row's cross entropy; the logits become its gradient.

    Args:
        logits: [n, vocab], rows dense, fp32 or narrower; overwritten where `gradient`.
        targets: int64 [n]; the loss and the gradient of a row whose target is -100 are zero.
        gradient: whether to overwrite the logits with softmax - onehot; they stay otherwise.

    Returns:
        Losses, fp32 [n].
    """
    rows, vocab = logits.shape
    targets = targets.contiguous()  # of one token per row, a flattened view has strides
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _cross_entropy_kernel[(rows,)](
        logits,
        targets,
        losses,
        logits.stride(0),
        vocab,
        IGNORED=IGNORED,
        GRADIENT=gradient,
        BLOCK=block,
        num_warps=min(WARPS, max(1, block // 128)),
    )
    return losses


@triton.jit
def _cross_entropy_kernel(
    logits,
    targets,
    losses,
    stride,
    vocab,
    IGNORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows x vocab may exceed 2^31
    logits += row * stride
    target = tl.load(targets + row)
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(logits + at, tl.zeros((BLOCK,), tl.float32), mask=at < vocab)
    else:
        chosen = tl.load(logits + target).to(tl.float32)
        high = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(high, tl.max(x, 0))
            # a block of -inf alone has nothing to subtract: exp(-inf - 0) is the 0 it should be
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(high - base) + tl.sum(tl.exp(x - base), 0)
            high = higher
        tl.store(losses + row, tl.log(total) + (high - chosen))
        if GRADIENT:
            tl.debug_barrier()  # the target's logit is read before any thread overwrites it
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                softmax = tl.exp(x - high) / total
                tl.store(
                    logits + at, tl.where(at == target, softmax - 1.0, softmax), mask=at < vocab
                )
