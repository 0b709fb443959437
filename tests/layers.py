"""One layer's attention: a formula, and fill and sweep over pages to compare with it.

The formula is written apart from the backends: heads repeated, a boolean matrix of what each query
sees, softmax and autograd.
"""

import itertools
import random

import torch

from oomb.attention import ChunkAttention, LayerCall, Mask, attend
from oomb.cache import History
from oomb.cache.pool import LayerShape
from oomb.chunking import plan_chunks

SCALE = 0.3
BATCHES = {
    "one row": ([23], [[0]]),
    "shorter than a page": ([2], [[0]]),
    "a multiple of a chunk": ([24], [[0]]),
    "right padding, one row empty": ([23, 9, 0, 16], [[0]] * 4),
    "packed": ([40, 40, 33], [[0, 3, 4, 19, 32], [0, 8, 16], [0, 31]]),
}


def visible(queries, keys, mask, device="cpu"):
    """Bool [queries, keys]."""
    back = torch.arange(queries, device=device)[:, None] + mask.offset
    back = back - torch.arange(keys, device=device)
    seen = torch.ones_like(back, dtype=torch.bool)
    if mask.causal:
        seen &= back >= 0
    if mask.window is not None:
        seen &= back < mask.window
    return seen


def formula(q, k, v, seen, sink=None):
    """out [B, H, N, D] and lse [B, H, N]; every query must see some key.

    A sink [H] is one more score of each query, whose weight is dropped.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) * SCALE
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.matmul(scores.softmax(-1)[..., : v.shape[2]], v), scores.logsumexp(-1)


def truth(q, k, v, grad_out, seen, sink=None):
    """out, lse, dq, dk, dv (and dsink) of the formula, in the dtype of its inputs."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sink) if x is not None]
    out, lse = formula(*leaves[:3], seen, *leaves[3:])
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)


def error(a, b):
    """Largest difference, relative to the largest number (absolute below 1)."""
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0))


def layer_tensors(rows, tokens, dtype=torch.float64, heads=(4, 2), dim=4, device="cpu"):
    """q, k, v [B, heads, N, dim] and grad_out [B, N, H, dim]."""
    q, k, v, grad = (
        torch.randn(rows, each, tokens, dim, dtype=torch.float64, device=device).to(dtype)
        for each in (heads[0], heads[1], heads[1], heads[0])
    )
    return q, k, v, grad.transpose(1, 2).contiguous()


def chunked_layer(
    backend, q, k, v, grad_out, lengths, documents, sizes, window=None, grads=None, scatter=False,
    sink=None,
):  # fmt: skip
    """One layer's attention by fill and sweep; the arguments and results are whole sequences.

    `scatter` takes the pool's slots in any order.
    """
    chunk_size, page_size, segment_pages = sizes
    plan = plan_chunks(lengths, documents, chunk_size=chunk_size, page_size=page_size)
    history = History(
        [LayerShape(k.shape[1], k.shape[3], k.dtype)],
        pages_per_row=plan.pages_per_row,
        page_size=page_size,
        segment_pages=segment_pages,
        page_grad_dtype=grads or torch.promote_types(k.dtype, torch.float32),
        device=q.device,
    )
    if scatter:
        random.shuffle(history.table._free)
    results = [torch.zeros_like(x) for x in (q.transpose(1, 2), q, k, v)]

    def call(chunk):
        return LayerCall(0, SCALE, window, chunk, history, backend, sink=sink)

    if sink is not None:
        sink = sink.detach().requires_grad_()
        sink.grad_dtype = torch.promote_types(sink.dtype, torch.float32)
    for chunk in plan.chunks[:-1]:
        at = slice(chunk.start, chunk.stop)
        for write in chunk.writes:
            history.table.hold(write.row, write.first, write.last)
        results[0][:, at], _ = attend(call(chunk), q[:, :, at], k[:, :, at], v[:, :, at])
        for write in chunk.writes:
            here = slice(chunk.start + write.start, chunk.start + write.stop)
            history.write(0, write.row, write.first, k[write.row, :, here], v[write.row, :, here])
    history.open_gradients()
    for chunk in reversed(plan.chunks):
        at = slice(chunk.start, chunk.stop)
        leaves = [x[:, :, at].detach().requires_grad_() for x in (q, k, v)]
        out, lse = ChunkAttention.apply(*leaves, call(chunk), sink)
        assert not lse.requires_grad
        if chunk is plan.chunks[-1]:
            results[0][:, at] = out.detach()
        else:
            assert torch.equal(out, results[0][:, at])  # the sweep repeats the fill
        out.backward(grad_out[:, at])
        for result, leaf in zip(results[1:], leaves, strict=True):
            result[:, :, at] = leaf.grad
        for write in chunk.writes:
            history.table.release(write.row, write.first)
    return results if sink is None else [*results, sink.grad]


def whole_layer(q, k, v, grad_out, lengths, documents, window=None, sink=None):
    """The same by the formula, document by document; padding gives and takes nothing."""
    results = [torch.zeros_like(x) for x in (q.transpose(1, 2), q, k, v)]
    results += [] if sink is None else [torch.zeros_like(sink)]
    for row, (length, starts) in enumerate(zip(lengths, documents, strict=True)):
        for a, b in itertools.pairwise([*starts, max(length, starts[-1])]):
            if a == b:
                continue
            part = [x[row : row + 1, :, a:b] for x in (q, k, v, grad_out.transpose(1, 2))]
            seen = visible(b - a, b - a, Mask(causal=True, window=window), q.device)
            out, _, *grads = truth(*part, seen, sink)
            results[0][row, a:b] = out[0].transpose(0, 1)
            for result, grad in zip(results[1:4], grads[:3], strict=True):
                result[row, :, a:b] = grad[0]
            for result, grad in zip(results[4:], grads[3:], strict=True):
                result += grad
    return results
