"""Models that their configuration or their modules rule out, each refused by name."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

PLAIN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def refuse_by_config(whole: PreTrainedModel) -> None:
    """Refuse, without running it, a model of a kind that the engine cannot compute exactly."""
    name = type(whole).__name__
    if whole.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{name} trains on its own loss {whole.loss_function.__name__}; the engine "
            "computes transformers' ForCausalLMLoss only"
        )
    config = whole.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ()) - PLAIN_LAYER_TYPES
    if types:
        raise ValueError(
            f"{name} has layers of type {', '.join(sorted(types))}; the engine supports "
            "full_attention and sliding_attention layers only"
        )
    if getattr(config, "layerdrop", 0):
        raise ValueError(
            f"{name} leaves layers out at random in training (layerdrop={config.layerdrop}); set "
            "config.layerdrop=0"
        )
    for path, module in whole.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Conv1d) or any(word in kind for word in ("Mamba", "SSM", "Rwkv")):
            raise ValueError(
                f"{name} carries state between tokens outside of attention ({path}, {kind}); "
                "hybrid state-space models are not supported"
            )
        rope = getattr(module, "rope_type", None)
        for rope_type in rope.values() if isinstance(rope, dict) else [rope]:
            if isinstance(rope_type, str) and any(w in rope_type for w in LENGTH_DEPENDENT_ROPE):
                raise ValueError(
                    f"{name} uses RoPE of type '{rope_type}', whose angles depend on the length "
                    "of each call; use a model with a fixed RoPE (default, linear, llama3, yarn)"
                )
