"""The loss of a linear head, without autograd, against the model's own way to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from helpers import gradients, relative_error, tiny_model, twin_in_fp64, whole_run, worst_error
from torch import nn
from torch.nn import functional

import oomb
from oomb.batch import IGNORED
from oomb.hf import unwrap
from oomb.loss import linear_head
from oomb.loss.linear_head import linear_loss, linear_loss_and_gradient, tokens_per_block
from oomb.probes import find_linear_head, probe_model

SIZES = {"chunk_size": 12, "page_size": 4, "attention_backend": "reference"}
VOCAB, HIDDEN = 31, 8
ROUNDING = 2e-5


def in_pytorch(logits, targets, *, gradient=True):
    """What the kernel does, by PyTorch's own operators."""
    leaf = logits.float().clone().requires_grad_()
    with torch.enable_grad():
        losses = functional.cross_entropy(leaf, targets, ignore_index=IGNORED, reduction="none")
        total = losses.sum()
    if gradient:
        logits.copy_(*torch.autograd.grad(total, leaf))
    return losses.detach()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(linear_head, "cross_entropy_", in_pytorch)
    monkeypatch.setattr("oomb.engine.can_run", lambda device, dtype: True)


# -- one chunk ------------------------------------------------------------------------------------


def inputs(rows=2, tokens=13, ignored=0.3, dtype=torch.float32):
    hidden = torch.randn(rows, tokens, HIDDEN).to(dtype)
    targets = torch.randint(0, VOCAB, (rows, tokens))
    return hidden, targets.masked_fill(torch.rand(rows, tokens) < ignored, IGNORED)


def whole(layer, hidden, targets, scale):
    leaf = hidden.detach().requires_grad_()
    loss = functional.cross_entropy(
        layer(leaf).float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss.detach(), *torch.autograd.grad(loss * scale, [leaf, *layer.parameters()])


@pytest.mark.parametrize("block", [1, 3, 7, 26, 4096])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.1])
def test_blocks_equal_the_whole(block, bias, ignored, monkeypatch):
    monkeypatch.setattr(linear_head, "MAX_TOKENS", block)
    layer, (hidden, targets) = nn.Linear(HIDDEN, VOCAB, bias=bias), inputs(ignored=ignored)
    expected = whole(layer, hidden, targets, 0.25)
    loss, gradient = linear_loss_and_gradient(layer, hidden, targets, 0.25)
    assert loss.dtype == torch.float64
    assert gradient.shape == hidden.shape
    results = (loss.float(), gradient, *(p.grad for p in layer.parameters()))
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(linear_loss(layer, hidden, targets), loss, rtol=1e-6, atol=0.0)


def test_gradients_add_to_those_there_and_a_frozen_head_gets_none():
    layer, (hidden, targets) = nn.Linear(HIDDEN, VOCAB), inputs()
    before = torch.randn_like(layer.weight)
    layer.weight.grad = before.clone()
    layer.bias.requires_grad_(False)
    linear_loss_and_gradient(layer, hidden, targets, 0.5)
    layer.bias.requires_grad_(True)
    expected = whole(layer, hidden, targets, 0.5)
    torch.testing.assert_close(layer.weight.grad, before + expected[2], rtol=1e-5, atol=1e-6)
    assert layer.bias.grad is None
    layer.requires_grad_(False).weight.grad = None
    _, gradient = linear_loss_and_gradient(layer, hidden, targets, 0.5)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-5, atol=1e-6)
    assert layer.weight.grad is None


def test_a_scale_too_small_for_fp16_logits_loses_nothing():
    layer, (hidden, targets) = nn.Linear(HIDDEN, VOCAB).half(), inputs(dtype=torch.float16)
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
    scale = 2.0**-22  # times a probability: below fp16's smallest number
    linear_loss_and_gradient(layer, hidden, targets, scale)
    wide = nn.Linear(HIDDEN, VOCAB)
    wide.load_state_dict(layer.state_dict())
    expected = whole(wide, hidden.float(), targets, scale)
    for parameter, theirs in zip(layer.parameters(), expected[2:], strict=True):
        assert relative_error(parameter.grad.double(), theirs.double()) < 0.01


@pytest.mark.parametrize(
    ("vocab", "dtype", "tokens"),
    [
        (152064, torch.bfloat16, 4096),
        (152064, torch.float32, 2176),
        (32000, torch.float32, 4096),
        (1 << 28, torch.float32, 1),
    ],
    ids=str,
)
def test_a_blocks_logits_are_bounded(vocab, dtype, tokens):
    assert tokens_per_block(vocab, dtype) == tokens


# -- which models ---------------------------------------------------------------------------------


def lora_head() -> nn.Module:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    return peft.get_peft_model(tiny_model("qwen2", torch.float32), adapter)


@pytest.mark.parametrize(
    ("make_model", "is_linear"),
    [
        (lambda: tiny_model("qwen2", torch.float32), True),
        (lambda: tiny_model("llama", torch.bfloat16, tie_word_embeddings=True), True),
        (lambda: tiny_model("gpt2", torch.float32), True),
        (lambda: tiny_model("granite", torch.float32), False),  # scales its logits
        (lambda: tiny_model("gemma2", torch.bfloat16), False),  # caps them
        (lambda: tiny_model("gemma2", torch.bfloat16, final_logit_softcapping=30.0), False),
        (lambda: tiny_model("gemma2", torch.bfloat16, final_logit_softcapping=None), True),
        (lora_head, False),
    ],
    ids=["qwen2", "tied", "gpt2", "granite", "gemma2", "high cap", "no cap", "lora"],
)
def test_only_a_plain_linear_head_is_taken(make_model, is_linear):
    whole = unwrap(make_model())
    layer = find_linear_head(*probe_model(whole))
    assert layer is (whole.get_output_embeddings() if is_linear else None)
    with oomb.Engine(whole, oomb.EngineConfig(**SIZES)) as engine:
        assert ("cross_entropy" in engine.fused_kernels) is is_linear
    with oomb.Engine(whole, oomb.EngineConfig(**SIZES, fused_kernels="off")) as engine:
        assert engine.fused_kernels == ()


def test_hooks_of_the_head_still_fire():
    model = tiny_model("qwen2", torch.float32)
    ids = torch.randint(0, 97, (1, 29))
    with oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine:
        engine.step(ids)
        expected = gradients(model)
        model.zero_grad()
        calls = []
        model.lm_head.register_forward_hook(lambda *_: calls.append(1))
        engine.step(ids)
    assert calls
    assert worst_error(gradients(model), expected)[0] < ROUNDING


# -- in a step ------------------------------------------------------------------------------------


def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(3))


def only(*trained: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = tiny_model("qwen2", torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))
        return model

    return make


def lora() -> nn.Module:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(tiny_model("qwen2", torch.float32), adapter)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "all": lambda: tiny_model("qwen2", torch.float32),
    "tied": lambda: tiny_model("llama", torch.float32, tie_word_embeddings=True),
    "experts": lambda: tiny_model("qwen3_moe", torch.float32),
    "head alone": only("lm_head"),
    "all but the head": only("model."),
    "lora": lora,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, {"restore_grads": True}], ids=["", "restore"])
def test_a_step_equals_the_whole_run(name, settings):
    model = MODELS[name]()
    labels = ids().masked_fill(torch.rand(2, 29) < 0.3, IGNORED)
    loss, expected = whole_run(model, ids(), labels=labels)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, **settings)) as engine:
        assert "cross_entropy" in engine.fused_kernels
        result = engine.step(ids(), labels=labels)
        assert relative_error(result.loss.double(), loss) < 1e-6
        assert relative_error(engine.evaluate(ids(), labels=labels).double(), loss) < 1e-6
        engine.step(ids(), labels=labels)
        twice = {name: 2 * grad for name, grad in expected.items()}
        error, parameter = worst_error(gradients(model), twice)
        assert error < ROUNDING, parameter


@pytest.mark.parametrize("restore", [False, True])
def test_an_abandoned_step_leaves_the_heads_gradient_as_the_others(restore):
    model = tiny_model("qwen2", torch.float32)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, restore_grads=restore)) as engine:
        steps = engine.iter_step(ids())
        for _ in range(4):
            next(steps)
        steps.close()
        assert all(p.grad is None for p in model.parameters())
        engine.step(ids())
        before = gradients(model)
        steps = engine.iter_step(ids())
        for _ in range(4):
            next(steps)
        steps.close()
        if restore:
            assert all(torch.equal(gradients(model)[name], before[name]) for name in before)
            return
        with pytest.raises(RuntimeError, match="did not finish"):
            engine.step(ids())
        model.zero_grad()
        engine.step(ids())
    assert worst_error(gradients(model), before)[0] < ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_errors_are_at_most_twice_transformers_own(dtype, monkeypatch):
    monkeypatch.undo()
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 1003}
    model = tiny_model("llama", dtype, **sizes).cuda()
    tokens = torch.randint(0, 1003, (2, 203), device="cuda")
    _, ordinary = whole_run(model, tokens)
    _, exact = whole_run(twin_in_fp64(model, "llama", **sizes), tokens)
    config = oomb.EngineConfig(chunk_size=48, page_size=16)
    with oomb.Engine(model, config) as engine:
        assert "cross_entropy" in engine.fused_kernels
        engine.step(tokens)
        ours = gradients(model)
    for name in exact:
        allowed = 2 * relative_error(ordinary[name], exact[name]) + 1e-3
        assert relative_error(ours[name], exact[name]) <= allowed, name
