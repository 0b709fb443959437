"""What the engine knows about a model once it has looked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from oomb.cache.pool import LayerShape


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, as a probing forward saw it.

    Attributes:
        module: the attention module.
        name: its path in the model.
        shape: what its pages hold.
        query_heads: heads of its queries and outputs.
        scale: factor on q . k.
        window: sliding window in tokens, or None.
        dropout: probability with which it drops attention weights in training.
    """

    module: nn.Module
    name: str
    shape: LayerShape
    query_heads: int
    scale: float
    window: int | None
    dropout: float


@dataclass(frozen=True)
class ModelFacts:
    """All that the engine knows about a model.

    Attributes:
        layers: attention layers in order of their first call; the order numbers them.
        output_class: what the base model returns.
        max_positions: rows of a learned position table, or None.
        experts: whether tokens choose experts.
    """

    layers: list[AttentionLayer]
    output_class: type
    max_positions: int | None
    experts: bool
