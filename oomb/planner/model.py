"""What a plan needs to know of a model, read off one that takes no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oomb.cache.pool import LayerShape


@dataclass(frozen=True)
class ModelSizes:
    """What the plan needs to know of a model.

    Attributes:
        weights: bytes of parameters and buffers.
        trained: number of parameters that get gradients.
        dtype: of the parameters.
        layers: K and V of each attention layer.
        query_heads: of a layer.
        hidden: width of a hidden state.
        vocab: entries of the vocabulary.
        saved: numbers that autograd keeps per token of one decoder layer.
    """

    weights: int
    trained: int
    dtype: torch.dtype
    layers: list[LayerShape]
    query_heads: int
    hidden: int
    vocab: int
    saved: int

    @property
    def itemsize(self) -> int:
        """Bytes of one parameter."""
        return self.dtype.itemsize

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> ModelSizes:
        """Sizes of the causal language model that a transformers config describes.

        Args:
            config: a transformers config; its model is made without memory.
            dtype: of its weights.

        Returns:
            The sizes.
        """
        with torch.device("meta"):
            return cls.of_model(AutoModelForCausalLM.from_config(config, dtype=dtype))

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelSizes:
        """Sizes of a model that is there."""
        text, dtype = model.config.get_text_config(), model.dtype
        heads = text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        count = text.num_hidden_layers
        tensors = [*model.parameters(), *model.buffers()]
        return cls(
            weights=sum(tensor.nbytes for tensor in tensors),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            dtype=dtype,
            layers=[LayerShape(kv_heads, dim, dtype)] * count,
            query_heads=heads,
            hidden=text.hidden_size,
            vocab=text.vocab_size,
            saved=_saved_numbers(model, count, text.hidden_size, heads * dim),
        )


def _saved_numbers(model: nn.Module, layers: int, hidden: int, queries: int) -> int:
    """Per token of a layer: its input and the residual between, both also normed; attention's
    output; what every linear layer gives but the two that end in the residual; and the gated
    product before the last.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    linears = [_widths(module) for module in lists[0][0].modules()] if lists else []
    linears = [widths for widths in linears if widths is not None]
    ends = [into for into, out in linears if out == hidden and into != hidden]
    if queries in ends:
        ends.remove(queries)
    return 2 * hidden + queries + sum(out for _, out in linears) + max(ends, default=0)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Into and out of a linear layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        return tuple(module.weight.shape)
    return None
