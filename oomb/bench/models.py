"""Models with random weights, in the shapes that are measured."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

QWEN2_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SHAPES = {"qwen2-7b": QWEN2_7B, "tiny": TINY}


def make_model(
    shape: dict[str, Any], layers: int, *, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A Qwen2 in training mode, attention by SDPA; always the same weights.

    Args:
        shape: Qwen2Config's arguments.
        layers: decoder layers, instead of the shape's.
        device: where it is made.
        dtype: of its parameters.

    Returns:
        The model.
    """
    config = Qwen2Config(**{**shape, "num_hidden_layers": layers})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.train()
