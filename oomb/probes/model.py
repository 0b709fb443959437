"""A model's parts and settings, found by asking it rather than by knowing its family."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from oomb.hf import CausalLM, without_traces
from oomb.moe import RouterSettings
from oomb.probes.attention import watch_attention
from oomb.probes.facts import ModelFacts
from oomb.probes.refusals import refuse_by_config


def probe_model(whole: PreTrainedModel) -> tuple[CausalLM, ModelFacts]:
    """Look at a model's configuration and at small forwards.

    Args:
        whole: the model with its head.

    Returns:
        Its parts, and what the engine needs to know of it.

    Raises:
        ValueError: chunk recurrence would not be exact, or is not built; the message names why.
    """
    refuse_by_config(whole)
    model = CausalLM(whole, _find_base(whole))
    layers, output_class = watch_attention(model)
    config = whole.config.get_text_config()
    experts = any(getattr(config, key, None) for key in ("num_experts", "num_local_experts"))
    router_settings(model)  # refuses a model whose settings cannot be read
    facts = ModelFacts(layers, output_class, _learned_positions(model), experts)
    return model, facts


def _find_base(whole: PreTrainedModel) -> nn.Module:
    """The module that a model's own forward asks for hidden states.

    Usually `base_model`; some families call the decoder inside it.
    """
    called: list[nn.Module] = []
    handles = [
        module.register_forward_pre_hook(lambda module, _: called.append(module))
        for module in (whole.base_model, whole.get_decoder())
        if module is not whole
    ]
    ids = torch.zeros((1, 1), dtype=torch.int64, device=next(whole.parameters()).device)
    try:
        with without_traces(whole, training=False):
            whole(input_ids=ids, use_cache=False, return_dict=True)
    finally:
        for handle in handles:
            handle.remove()
    if not called:
        raise ValueError(
            f"model must be a causal language model with a head over a base model, but "
            f"{type(whole).__name__}.forward calls no base model; load it with "
            "AutoModelForCausalLM"
        )
    return called[0]


def router_settings(model: CausalLM) -> RouterSettings | None:
    """Settings of the load-balancing loss, if the model adds it to its loss."""
    whole = model.whole
    if not getattr(whole.config, "output_router_logits", False):
        return None
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    missing = [name for name in names if not hasattr(whole, name)]
    if missing:
        raise ValueError(
            f"{type(whole).__name__} adds a router loss but has no {', '.join(missing)}; set "
            "config.output_router_logits=False to train without it"
        )
    return RouterSettings(*(getattr(whole, name) for name in names))


def _learned_positions(model: CausalLM) -> int | None:
    """Rows of a learned position table: an embedding beside the token embedding."""
    tokens = model.whole.get_input_embeddings()
    for name, module in model.base.named_modules():
        is_table = isinstance(module, nn.Embedding) and module is not tokens
        if is_table and any(word in name for word in ("wpe", "position")):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None
