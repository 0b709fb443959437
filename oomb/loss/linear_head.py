"""Loss of a head that is one linear layer: each block's logits turn into their gradient in place.

Beside `blocks`, which asks the model for its logits, whatever it does to them, this skips autograd:
three GEMMs and one kernel per block, with one block of logits alive and nothing else of its size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from oomb.linear import add_gradient, add_weight_gradient

try:
    from oomb.loss.cross_entropy import cross_entropy_
except ImportError:  # no Triton, as on a machine without a GPU
    cross_entropy_ = None

MAX_TOKENS = 4096
MAX_LOGITS_BYTES = int(1.3 * 2**30)
TILE = 128


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on logits of this dtype here."""
    narrow = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return cross_entropy_ is not None and device.type == "cuda" and narrow


def tokens_per_block(vocab: int, dtype: torch.dtype) -> int:
    """Most tokens whose logits are alive at once.

    Every block reads and writes the head's weight gradient, 4 bytes x vocab x hidden, while its
    GEMMs do 6 x tokens x vocab x hidden operations: from a few thousand tokens on, that traffic is
    hidden behind the arithmetic, and more would only take memory.
    """
    fitting = MAX_LOGITS_BYTES // (vocab * dtype.itemsize)
    return max(1, min(MAX_TOKENS, fitting // TILE * TILE or fitting))


def linear_loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A chunk's summed loss, without gradients.

    Args:
        head: the layer that makes logits.
        hidden: [B, n, hidden].
        targets: int64 [B, n], shifted already; -100 ignored.

    Returns:
        The sum, fp64 0-d.
    """
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    with torch.no_grad():
        for rows, wanted in _blocks(head, hidden, targets):
            logits = functional.linear(rows, head.weight, head.bias)
            total += cross_entropy_(logits, wanted, gradient=False).sum(dtype=torch.float64)
    return total


def linear_loss_and_gradient(
    head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's summed loss, and the gradient of `scale` times it.

    The head's parameters receive their gradients here, block by block.

    Args:
        head: the layer that makes logits.
        hidden: [B, n, hidden]; its graph is not entered.
        targets: int64 [B, n], shifted already; -100 ignored.
        scale: 1 / number of counted labels. The GEMMs apply it to their sums, so that no gradient
            of a logit is too small for fp16.

    Returns:
        Summed loss (fp64, 0-d) and gradient with respect to `hidden`, in its shape and dtype.
    """
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    gradients = []
    with torch.no_grad():
        for rows, wanted in _blocks(head, hidden, targets):
            logits = functional.linear(rows, head.weight, head.bias)
            total += cross_entropy_(logits, wanted).sum(dtype=torch.float64)
            out = torch.empty_like(rows)
            gradients.append(torch.addmm(out, logits, head.weight, beta=0, alpha=scale, out=out))
            if head.weight.requires_grad:
                add_weight_gradient(head.weight, logits, rows, alpha=scale)
            if head.bias is not None and head.bias.requires_grad:
                add_gradient(head.bias, logits.sum(0, dtype=torch.float32), alpha=scale)
            del logits  # before the next block's
    gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
    return total, gradient.view(hidden.shape)


def _blocks(
    head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and targets of a block of tokens each, [tokens, hidden] and [tokens]."""
    rows, wanted = hidden.detach().flatten(0, 1), targets.flatten()
    count = -(-len(rows) // tokens_per_block(head.weight.shape[0], hidden.dtype))
    block = -(-len(rows) // count)  # all alike, so that there are few shapes
    return list(zip(rows.split(block), wanted.split(block), strict=True))
