"""How many floating-point operations a step takes, useful and computed.

A linear layer's forward is 2 operations per weight and token, its backward twice that (gradients of
inputs and of weights). Attention's forward is 4 H D per query-key pair (q . k and weights . v). Its
backward needs four such products, 2 times the forward, but flash kernels compute 2.5 times: they
make the scores again. The loss is the head: forward and backward. Everything else is not counted.

*Useful* is what the ordinary forward and backward need, nothing twice. *Computed* counts what each
side runs: layers computed again, the fill, the scores made again.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNEL_BACKWARD = 2.5
USEFUL_BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """A decoder model's sizes, in numbers, heads and layers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def down(self) -> int:
        """Weights of a layer's last linear layer."""
        return self.intermediate * self.hidden

    @property
    def linear(self) -> int:
        """Weights of a layer's linear layers: q, k, v, o, gate, up, down."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * query + 2 * key) + 3 * self.down

    @property
    def behind_attention(self) -> int:
        """Weights of a layer's linear layers behind its attention: o, gate, up, down."""
        return self.hidden * self.heads * self.head_dim + 3 * self.down

    @property
    def per_pair(self) -> int:
        """Operations of attention's forward for one query and one key, over all layers."""
        return 4 * self.heads * self.head_dim * self.layers


@dataclass(frozen=True)
class StepFlops:
    """Operations of one step, by the kind of kernel that runs them."""

    linear: float
    attention_forward: float
    attention_backward: float
    loss: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.linear + self.attention_forward + self.attention_backward + self.loss


def pairs(queries: int, before: int = 0) -> int:
    """Query-key pairs of consecutive causal queries behind `before` tokens of history."""
    return queries * before + queries * (queries + 1) // 2


def useful(sizes: LayerSizes, tokens: int) -> StepFlops:
    """What an ordinary forward and backward need."""
    forward = sizes.per_pair * pairs(tokens)
    return StepFlops(
        linear=3 * 2 * sizes.layers * sizes.linear * tokens,
        attention_forward=forward,
        attention_backward=USEFUL_BACKWARD * forward,
        loss=_loss(sizes, tokens),
    )


def checkpointed(sizes: LayerSizes, tokens: int) -> StepFlops:
    """What layer checkpointing computes: every layer's forward twice, but for its last product."""
    forward = sizes.per_pair * pairs(tokens)
    again = sizes.linear - sizes.down
    return StepFlops(
        linear=2 * sizes.layers * tokens * (3 * sizes.linear + again),
        attention_forward=2 * forward,
        attention_backward=KERNEL_BACKWARD * forward,
        loss=_loss(sizes, tokens),
    )


def chunked(
    sizes: LayerSizes,
    tokens: int,
    *,
    chunk: int,
    policy: str,
    live_chunks: int,
    keep_fill_outputs: bool,
) -> StepFlops:
    """What chunk recurrence computes.

    Every chunk but the last `live_chunks` is filled: one more forward, whose last layer ends with
    its keys and values from the second chunk on. `selective` and `layer` compute a layer's
    linear layers again, but for its last product, and `layer` its attention too. Attention outputs
    kept from the fill spare both later attention forwards.

    Args:
        sizes: the model's.
        tokens: of the sequence.
        chunk: tokens per chunk.
        policy: `keep`, `selective` or `layer`.
        live_chunks: chunks at the end that go from one forward to their backward.
        keep_fill_outputs: whether attention outputs are kept from the fill.

    Returns:
        The operations.
    """
    linear = attention = 0
    unfilled = unfilled_pairs = 0  # what the fill's last layer leaves out
    again = 0 if policy == "keep" else sizes.linear - sizes.down
    starts = range(0, tokens, chunk)
    for index, start in enumerate(starts):
        queries = min(chunk, tokens - start)
        filled = index < len(starts) - live_chunks
        linear += queries * ((filled + 3) * sizes.linear + again)
        forwards = 1 if filled and keep_fill_outputs else filled + 1 + (policy == "layer")
        attention += forwards * pairs(queries, start)
        if filled and start:
            unfilled += queries * sizes.behind_attention
            unfilled_pairs += 0 if keep_fill_outputs else pairs(queries, start)
    return StepFlops(
        linear=2 * (sizes.layers * linear - unfilled),
        attention_forward=sizes.per_pair * attention
        - sizes.per_pair // sizes.layers * unfilled_pairs,
        attention_backward=KERNEL_BACKWARD * sizes.per_pair * pairs(tokens),
        loss=_loss(sizes, tokens),
    )


def _loss(sizes: LayerSizes, tokens: int) -> float:
    return 3 * 2 * sizes.vocab * sizes.hidden * tokens
