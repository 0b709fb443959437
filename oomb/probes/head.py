"""Whether a model's way from hidden states to logits is one linear layer and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from oomb.hf import CausalLM, without_traces
from oomb.linear import is_plain
from oomb.probes.facts import ModelFacts

TOKENS = 16
LARGE = 64.0
"""A cap on logits near zero may round to the same bits: they are compared at this size as well."""


def find_linear_head(model: CausalLM, facts: ModelFacts) -> nn.Linear | None:
    """The layer that alone makes a model's logits from its hidden states.

    Args:
        model: the model.
        facts: what the probe found.

    Returns:
        The layer, or None where the logits are not bit for bit that layer's output, or the model
        has a larger vocabulary than the layer.
    """
    layer = model.whole.get_output_embeddings()
    if not is_plain(layer) or layer.out_features < model.vocab_size:
        return None
    weight = layer.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = (1, TOKENS, layer.in_features)
    hidden = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device=weight.device)
    with without_traces(model.whole, training=False), model.head(facts.output_class) as head:
        for _ in range(2):
            logits = functional.linear(hidden, weight, layer.bias)
            if not torch.equal(head(hidden, ids).float(), logits.float()):
                return None
            hidden = hidden * (LARGE / logits.float().std()).to(hidden.dtype)
    return layer


def is_watched(layer: nn.Module) -> bool:
    """Whether something waits for the layer to be called: hooks, or a forward of its own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(layer) or any(getattr(layer, name) for name in hooks)
