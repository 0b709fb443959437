"""Shared by the tests: tiny models, runs in true fp64, comparison of every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import oomb

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen2": lambda **kw: Qwen2Config(**{**SIZES, **kw}),
    "qwen3": lambda **kw: Qwen3Config(**{**SIZES, "head_dim": 8, **kw}),
    "llama": lambda **kw: LlamaConfig(**{**SIZES, **kw}),
    "mistral": lambda **kw: MistralConfig(**{**SIZES, "sliding_window": None, **kw}),
    "qwen3_moe": lambda **kw: Qwen3MoeConfig(
        **{
            **SIZES,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
            "experts_implementation": "eager",
            **kw,
        }
    ),
    "gemma2": lambda **kw: Gemma2Config(
        **{
            **SIZES,
            "head_dim": 8,
            "sliding_window": 4096,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 5.0,
            **kw,
        }
    ),
    "gemma3": lambda **kw: Gemma3TextConfig(
        **{
            **SIZES,
            "head_dim": 8,
            "sliding_window": 4096,
            "layer_types": ["sliding_attention", "full_attention"],
            **kw,
        }
    ),
    "gpt_oss": lambda **kw: GptOssConfig(
        **{
            **SIZES,
            "head_dim": 8,
            "sliding_window": 4096,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
            "experts_implementation": "eager",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            **kw,
        }
    ),
    "granite": lambda **kw: GraniteConfig(**{**SIZES, "logits_scaling": 4.0, **kw}),
    "gpt2": lambda **kw: GPT2Config(
        **{
            "vocab_size": 97,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            **kw,
        }
    ),
}


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any
) -> torch.nn.Module:
    """A random model with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    attention = "eager" if family in ("gemma2", "gemma3", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(
        CONFIGS[family](**config), dtype=dtype, attn_implementation=attention
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            elif "norm" not in name and "ln_" not in name:
                parameter.normal_(0.0, 0.5 if "sinks" in name else 0.1)
    return model.train()


def twin_in_fp64(model: torch.nn.Module, family: str, **config: Any) -> torch.nn.Module:
    """A tiny model with the same weights in fp64; buffers such as RoPE's stay as they are made."""
    twin = tiny_model(family, torch.float64, **config)
    twin.load_state_dict(model.state_dict())
    return twin.to(next(model.parameters()).device)


def _keeps_doubles(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same method, except that an fp64 tensor is never narrowed to fp32."""

    def kept(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if method is _FLOAT:
                return x
        return method(x, *args, **kwargs)

    return kept


_FLOAT = torch.Tensor.float


@contextmanager
def true_fp64() -> Iterator[None]:
    """Run transformers in fp64 throughout.

    Its norms, softmax, RoPE and logits are cast to fp32 even in an fp64 model, which limits its
    own gradients to about 1e-7. Methods are patched rather than a TorchFunctionMode entered, since
    a mode is off inside backward, where layers are computed again.
    """
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch.Tensor, "float"),
            (torch.Tensor, "to"),
            (torch.Tensor, "softmax"),
            (torch, "softmax"),
            (torch.nn.functional, "softmax"),
        ):
            patch.setattr(owner, name, _keeps_doubles(getattr(owner, name)))
        yield


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, cloned and in fp64; zeros where there is none."""
    return {
        name: torch.zeros_like(p, dtype=torch.float64)
        if p.grad is None
        else p.grad.double().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def whole_run(model: torch.nn.Module, ids: torch.Tensor, **arguments: Any):
    """Loss and gradients of the ordinary way: model(...).loss.backward()."""
    model.zero_grad(set_to_none=True)
    arguments.setdefault("labels", ids)
    loss = model(input_ids=ids, use_cache=False, **arguments).loss
    loss.backward()
    grads = gradients(model)
    model.zero_grad(set_to_none=True)
    return loss.detach().double(), grads


def chunked_run(
    model: torch.nn.Module, ids: torch.Tensor, config: oomb.EngineConfig | dict, **arguments: Any
):
    """Loss and gradients of one engine step."""
    config = oomb.EngineConfig(**config) if isinstance(config, dict) else config
    model.zero_grad(set_to_none=True)
    with oomb.Engine(model, config) as engine:
        result = engine.step(ids, **arguments)
        grads = gradients(model)
        model.zero_grad(set_to_none=True)
    return result.loss.double(), grads


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||; absolute where b is zero."""
    norm = float(b.norm())
    return float((a - b).norm()) / (norm if norm > 1e-14 else 1.0)


def worst_error(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    """Largest relative error over parameters, and the parameter's name."""
    assert grads.keys() == expected.keys()
    errors = {name: relative_error(grads[name], expected[name]) for name in expected}
    name = max(errors, key=errors.__getitem__)
    return errors[name], name
