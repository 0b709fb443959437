"""The loss of a chunk, without the logits of a whole chunk.

`blocks` asks the model for its logits, a block of tokens at a time, whatever it does to them;
`linear_head` does without autograd where the head is one linear layer, by the kernel in
`cross_entropy`.
"""

from oomb.loss.blocks import block_size, chunk_loss, chunk_loss_and_gradient
from oomb.loss.linear_head import can_run, linear_loss, linear_loss_and_gradient

__all__ = [
    "block_size",
    "can_run",
    "chunk_loss",
    "chunk_loss_and_gradient",
    "linear_loss",
    "linear_loss_and_gradient",
]
