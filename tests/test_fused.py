"""Which of a model's parts fused functions replace, with functions in PyTorch in their place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from helpers import gradients, relative_error, tiny_model, twin_in_fp64, whole_run, worst_error
from torch import nn
from torch.nn import functional
from transformers.models.qwen2 import modeling_qwen2
from untouched import changes, picture

import oomb
from oomb import fused
from oomb.fused import FusedFunctions, find_replacements, liger_functions
from oomb.hf import unwrap
from oomb.probes import probe_model

SIZES = {"chunk_size": 12, "page_size": 4, "attention_backend": "reference"}
ROUNDING = 2e-5


# -- fused functions that overwrite what liger-kernel's overwrite ---------------------------------


def rms_norm(x, weight, *, eps, offset, casting):
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        return normal.to(x.dtype) * (weight + offset)
    return (normal * (weight.float() + offset)).to(x.dtype)


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return functional.silu(a.float()).to(b.dtype) * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        wide = a.float()
        sigmoid = wide.sigmoid()
        grad_a = grad * (wide * sigmoid * (1 - sigmoid) + sigmoid) * b
        grad_b = grad * wide * sigmoid
        a.data.copy_(grad_a)  # past autograd's version counter, as a kernel does
        b.data.copy_(grad_b)
        return a, b


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        for x in (q, k):
            x.data.copy_(turned(x, cos, sin))
        return q.transpose(1, 2).transpose(1, 2), k.transpose(1, 2).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        cos, sin = ctx.saved_tensors
        for x in (grad_q, grad_k):
            x.data.copy_(turned(x, cos, -sin))
        return grad_q, grad_k, None, None


FAKES = FusedFunctions(rms_norm, SiluMul.apply, Rope.apply)


def replaced(model: nn.Module, functions: FusedFunctions = FAKES) -> dict[str, list[str]]:
    """Names of the fused kernels, and what each would replace: paths of modules, or files."""
    model = unwrap(model)
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, list[str]] = {}
    for part in find_replacements(*probe_model(model), functions):
        where = names.get(id(part.owner)) or part.owner.__name__.rpartition(".")[2]
        found.setdefault(part.name, []).append(where)
    return found


# -- what is replaced ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "norms", "mlps", "ropes"),
    [
        ("qwen2", 5, 2, 1),
        ("qwen3", 9, 2, 1),  # with a norm of each head's queries and keys
        ("llama", 5, 2, 1),
        ("mistral", 5, 2, 1),
        ("granite", 5, 2, 1),
        ("gemma2", 9, 0, 1),  # 1 + weight; its MLPs use GELU
        ("gpt2", 0, 0, 0),
    ],
)
def test_parts_that_are_as_exact_are_replaced(family, norms, mlps, ropes, dtype):
    found = replaced(tiny_model(family, dtype))
    counts = [len(found.get(name, [])) for name in ("rms_norm", "swiglu", "rope")]
    assert counts == [norms, mlps, ropes]


def test_experts_are_left_to_the_model():
    found = replaced(tiny_model("qwen3_moe", torch.float32))
    assert set(found) == {"rms_norm", "rope"}


def wrong_by(factor: float) -> dict[str, FusedFunctions]:
    """Functions that are wrong in one place."""

    def scaled(value: Any) -> Any:
        return tuple(map(scaled, value)) if isinstance(value, tuple) else value * factor

    def gradients_scaled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(gradients_scaled, value))
        return value * factor + (value * (1 - factor)).detach()

    wrong = {}
    for kind, change in (("output", scaled), ("gradient", gradients_scaled)):
        for name in ("rms_norm", "silu_mul", "rope"):
            own = getattr(FAKES, name)
            spoiled = lambda *a, own=own, change=change, **k: change(own(*a, **k))  # noqa: E731
            wrong[f"{name} {kind}"] = replace(FAKES, **{name: spoiled})
    return wrong


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("place", wrong_by(1.0))
def test_a_function_that_is_less_exact_is_refused_and_the_log_says_so(place, dtype, error, caplog):
    name = {"rms_norm": "rms_norm", "silu_mul": "swiglu", "rope": "rope"}[place.split()[0]]
    model = tiny_model("qwen2", dtype)
    with caplog.at_level(logging.INFO, logger="oomb"):
        found = replaced(model, wrong_by(1 + error)[place])
    assert {"rms_norm", "swiglu", "rope"} - set(found) == {name}
    messages = [record.getMessage() for record in caplog.records]
    assert any(
        message.startswith(f"fused kernel {name}") and "relative error" in message
        for message in messages
    )
    assert set(replaced(model, wrong_by(1.0)[place])) == {"rms_norm", "swiglu", "rope"}


def test_a_gradient_of_one_input_alone_is_seen():
    def no_gradient_of_the_weight(x, weight, **keywords):
        return rms_norm(x, weight.detach(), **keywords) + 0 * weight.sum()

    found = replaced(
        tiny_model("llama", torch.float32), replace(FAKES, rms_norm=no_gradient_of_the_weight)
    )
    assert set(found) == {"swiglu", "rope"}


def test_a_function_that_raises_is_not_used(caplog):
    def broken(*arguments, **keywords):
        raise RuntimeError("no kernel image is available")

    with caplog.at_level(logging.INFO, logger="oomb"):
        found = replaced(tiny_model("llama", torch.float32), FusedFunctions(broken, broken, broken))
    assert found == {}
    assert sum("no kernel image" in record.getMessage() for record in caplog.records) == 3


class _DroppingMLP(nn.Module):
    """A gated MLP that does one more thing."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return functional.dropout(out, 0.1, self.training)


def test_an_mlp_that_does_more_is_left_alone():
    model = tiny_model("llama", torch.float32).eval()
    layer = model.model.layers[1]
    layer.mlp = _DroppingMLP(layer.mlp)
    assert replaced(model)["swiglu"] == ["model.layers.0.mlp"]


def test_a_forward_of_its_own_is_left_alone():
    model = tiny_model("llama", torch.float32)
    layer = model.model.layers[0]
    for module in (layer.mlp, layer.input_layernorm):
        module.forward = module.forward
    found = replaced(model)
    assert len(found["swiglu"]) == 1
    assert len(found["rms_norm"]) == 4


def test_rope_in_some_other_form_is_left_alone(monkeypatch, caplog):
    own = modeling_qwen2.apply_rotary_pos_emb

    def interleaved(q, k, cos, sin):
        return tuple(x.flip(-1) for x in own(q, k, cos, sin))

    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", interleaved)
    assert "rope" not in replaced(tiny_model("qwen2", torch.float32))


def test_looking_leaves_no_trace():
    model = tiny_model("qwen2", torch.bfloat16)
    model.model.layers[0].mlp.eval()
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
    probed = probe_model(model)
    before, space = picture(model), dict(vars(modeling_qwen2))
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert len(find_replacements(*probed, FAKES)) == 8
    assert changes(before, picture(model)) == []
    assert vars(modeling_qwen2) == space


def test_liger_is_asked_on_cuda_alone():
    assert liger_functions(torch.device("cpu"), torch.bfloat16) is None
    assert liger_functions(torch.device("cuda"), torch.float64) is None


# -- in a step ------------------------------------------------------------------------------------


def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(3))


def lora() -> nn.Module:
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(
        tiny_model("qwen2", torch.float32), peft.LoraConfig(r=4, target_modules=targets)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return model


def frozen_norms() -> nn.Module:
    model = tiny_model("qwen2", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: tiny_model("qwen2", torch.float32),
    "qwen3": lambda: tiny_model("qwen3", torch.float32),
    "gemma2": lambda: tiny_model("gemma2", torch.float32),
    "experts": lambda: tiny_model("qwen3_moe", torch.float32),
    "lora": lora,
    "frozen norms": frozen_norms,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_a_step_with_fused_functions_equals_the_whole_run(name, policy, monkeypatch):
    monkeypatch.setattr("oomb.engine.liger_functions", lambda device, dtype: FAKES)
    model = MODELS[name]()
    loss, expected = whole_run(model, ids())
    config = oomb.EngineConfig(**SIZES, activation_policy=policy, check_replay=True)
    space = sys.modules[type(unwrap(model).model.layers[0].self_attn).__module__]
    own_rope = space.apply_rotary_pos_emb
    before = picture(model)
    with oomb.Engine(model, config) as engine:
        assert {"rms_norm", "rope"} <= set(engine.fused_kernels)
        result = engine.step(ids())
        assert space.apply_rotary_pos_emb is own_rope
        error, parameter = worst_error(gradients(model), expected)
        assert relative_error(result.loss.double(), loss) < 1e-6
        assert error < ROUNDING, parameter
        model.zero_grad()
    assert changes(before, picture(model)) == []


def test_off_leaves_everything_to_the_model(monkeypatch):
    monkeypatch.setattr("oomb.engine.liger_functions", lambda device, dtype: FAKES)
    model = tiny_model("qwen2", torch.float32)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, fused_kernels="off")) as engine:
        assert engine.fused_kernels == ()
    with oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine:
        assert engine.fused_kernels == ("rms_norm", "swiglu", "rope")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2"])
def test_ligers_error_is_at_most_twice_transformers_own(family):
    pytest.importorskip("liger_kernel")
    model = tiny_model(family, torch.bfloat16, hidden_size=64).cuda()
    tokens = ids().cuda()
    _, ordinary = whole_run(model, tokens)
    _, exact = whole_run(twin_in_fp64(model, family, hidden_size=64), tokens)
    config = {"chunk_size": 16, "page_size": 8}
    with oomb.Engine(model, oomb.EngineConfig(**config)) as engine:
        assert {"rms_norm", "rope"} <= set(engine.fused_kernels)
        assert ("swiglu" in engine.fused_kernels) == (family != "gemma2")
        engine.step(tokens)
        ours = gradients(model)
    for name in exact:
        allowed = 2 * relative_error(ordinary[name], exact[name]) + 1e-3
        assert relative_error(ours[name], exact[name]) <= allowed, name


def test_a_single_token_is_turned_by_the_models_own_rope():
    """Liger steps by the stride of the token dimension, which means nothing for one token."""
    calls = []
    forward = fused._rope_forward(lambda *_: calls.append("own"), lambda *_: calls.append("fused"))
    for tokens in (1, 2):
        forward(torch.empty(2, 4, tokens, 8), torch.empty(2, 2, tokens, 8), None, None)
    assert calls == ["own", "fused"]
