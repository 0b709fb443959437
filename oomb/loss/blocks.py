"""The language-model head and loss, a block of tokens at a time.

Logits of a whole chunk would outweigh everything else alive (4096 tokens x 152,064 entries in
fp32 are 2.3 GiB, and their gradient as much again), so a block's logits are made, turned into
gradients and dropped before the next block starts. This way serves every head, since the model is
asked for its logits; `linear_head` is faster where those are one linear layer's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from oomb.batch import IGNORED

MAX_BLOCK_TOKENS = 1024
BLOCKS_PER_CHUNK = 4

Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps hidden states [B, n, hidden] and token ids [B, n] to logits [B, n, vocab]."""


def block_size(chunk_size: int) -> int:
    """Tokens per block: at most a quarter of a chunk."""
    return max(1, min(MAX_BLOCK_TOKENS, chunk_size // BLOCKS_PER_CHUNK))


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy in fp32 (fp64 for fp64 logits); ignored targets add nothing.

    Args:
        logits: [B, n, vocab].
        targets: int64 [B, n], shifted already; -100 ignored.

    Returns:
        The sum, 0-d.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def chunk_loss(
    head: Head,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    targets: torch.Tensor,
    block: int,
) -> torch.Tensor:
    """A chunk's summed loss, fp64 0-d, without gradients."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for at in _blocks(hidden.shape[1], block):
        total += loss_sum(head(hidden[:, at], ids[:, at]), targets[:, at])
    return total


def chunk_loss_and_gradient(
    head: Head,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    targets: torch.Tensor,
    block: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's summed loss, and the gradient of `scale` times it.

    The head's parameters receive their gradients here, block by block.

    Args:
        head: the model's own way from hidden states to logits.
        hidden: [B, n, hidden]; its graph is not entered.
        ids: int64 [B, n] token ids.
        targets: int64 [B, n].
        block: tokens per block.
        scale: 1 / number of counted labels.

    Returns:
        Summed loss (fp64, 0-d) and gradient with respect to `hidden`, in its shape and dtype.
    """
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    gradient = torch.empty_like(hidden)
    for at in _blocks(hidden.shape[1], block):
        leaf = hidden[:, at].detach().requires_grad_()
        loss = loss_sum(head(leaf, ids[:, at]), targets[:, at])
        (loss * scale).backward()
        gradient[:, at] = leaf.grad
        total += loss.detach()
    return total, gradient


def _blocks(tokens: int, block: int) -> list[slice]:
    return [slice(start, start + block) for start in range(0, tokens, block)]
