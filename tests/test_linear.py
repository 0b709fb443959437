"""Linear layers that add to their weights' gradients themselves, against autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from helpers import gradients, relative_error, tiny_model, worst_error
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import oomb
from oomb import linear
from oomb.linear import accumulating, add_gradient, add_weight_gradient, is_plain

SIZES = {"chunk_size": 12, "page_size": 4, "attention_backend": "reference"}


def layer(dtype: torch.dtype = torch.float64, **kwargs: Any) -> nn.Linear:
    return nn.Linear(5, 7, dtype=dtype, **kwargs)


def by_autograd_and_ours(
    module: nn.Linear, x: torch.Tensor, use: Callable[[torch.Tensor], torch.Tensor]
) -> list[list[torch.Tensor | None]]:
    """Output, gradients of input, weight and bias: by the module's own forward, then by ours."""
    results = []
    for forward in (module.forward, accumulating(module)):
        module.zero_grad()
        leaf = x.detach().requires_grad_(x.requires_grad)
        out = forward(leaf)
        use(out).backward()
        results.append([out.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    return results


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda out: (out * torch.arange(out.numel()).view(out.shape)).sum(),
    "expanded": lambda out: out.sum(),
    "transposed": lambda out: (
        out.transpose(0, -1) * torch.arange(out.numel()).view(out.transpose(0, -1).shape)
    ).sum(),
}


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 1, 3, 5)], ids=str)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_autograd(shape, use, bias):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    theirs, ours = by_autograd_and_ours(layer(bias=bias), x, USES[use])
    for their, our in zip(theirs, ours, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen):
    module = layer()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=frozen != "input")
    if frozen != "input":
        getattr(module, frozen).requires_grad_(False)
    theirs, ours = by_autograd_and_ours(module, x, USES["dense"])
    for their, our in zip(theirs, ours, strict=True):
        assert (our is None) == (their is None)
        if their is not None:
            torch.testing.assert_close(our, their, rtol=1e-14, atol=1e-14)


def test_an_input_that_is_a_transposed_view():
    x = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    module = layer()
    module(x.transpose(0, 2)).square().sum().backward()
    expected = module.weight.grad, x.grad
    module.weight.grad = x.grad = None
    accumulating(module)(x.transpose(0, 2)).square().sum().backward()
    torch.testing.assert_close((module.weight.grad, x.grad), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
    ],
    ids=str,
)
def test_terms_add_up_in_grad_dtype(dtype, grad_dtype):
    module = layer(dtype)
    for parameter in module.parameters():
        parameter.grad_dtype = grad_dtype
    terms = [torch.randn(3, 5).to(dtype) for _ in range(3)]
    for x in terms:
        module(x).square().sum().backward()
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()
    grads = []
    for x in terms:
        accumulating(module)(x).square().sum().backward()
        grads.append(module.weight.grad)
    assert grads[0] is grads[1] is grads[2]  # in place, in the tensor of the first term
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        assert parameter.grad.dtype == grad_dtype
        torch.testing.assert_close(parameter.grad, grad)


def test_adding_shows_in_the_gradients_version():
    """By which the ledger of a step knows the parameters it reached."""
    weight = nn.Parameter(torch.zeros(2, 3))
    rows = torch.ones(4, 2), torch.ones(4, 3)
    add_weight_gradient(weight, *rows)
    version = weight.grad._version
    add_weight_gradient(weight, *rows)
    assert weight.grad._version > version
    assert torch.equal(weight.grad, torch.full((2, 3), 8.0))


@pytest.mark.parametrize("existing", [False, True])
def test_alpha_is_applied_to_the_sums(existing):
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2))
    if existing:
        weight.grad, bias.grad = torch.ones(2, 3), torch.ones(2)
    grad_output, inputs = torch.randn(4, 2), torch.randn(4, 3)
    add_weight_gradient(weight, grad_output, inputs, alpha=0.5)
    add_gradient(bias, grad_output.sum(0), alpha=0.5)
    torch.testing.assert_close(weight.grad, 0.5 * grad_output.T @ inputs + float(existing))
    torch.testing.assert_close(bias.grad, 0.5 * grad_output.sum(0) + float(existing))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_an_output_without_gradient_reaches_no_weight():
    module, other = layer(), nn.Parameter(torch.ones((), dtype=torch.float64))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    (_NoGradient.apply(accumulating(module)(x)).sum() * other).backward()
    assert module.weight.grad is module.bias.grad is x.grad is None
    assert other.grad is not None


def test_a_weight_of_two_layers_and_an_embedding_gets_all_its_gradients():
    table = nn.Embedding(7, 5, dtype=torch.float64)
    first, second = layer(bias=False), layer(bias=False)
    first.weight = second.weight = table.weight
    ids = torch.tensor([[1, 3, 3]])

    def run(forwards):
        table.zero_grad()
        x = table(ids)
        (forwards[0](x).sin() * forwards[1](x)).sum().backward()
        return table.weight.grad

    expected = run([first.forward, second.forward])
    ours = run([accumulating(first), accumulating(second)])
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14)


def test_a_checkpointed_layer_stops_before_its_last_gemm(monkeypatch):
    """What is computed again is what backward needs, and the last product is not."""
    first, last = layer(), nn.Linear(7, 5, dtype=torch.float64)
    calls = []
    gemm = functional.linear

    def counted(*arguments):
        calls.append(arguments[1])
        return gemm(*arguments)

    monkeypatch.setattr(functional, "linear", counted)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def run(x):
        return x + accumulating(last)(accumulating(first)(x).relu())

    checkpoint(run, x, use_reentrant=False).square().sum().backward()
    assert [weight is last.weight for weight in calls] == [False, True, False]
    grads = [p.grad for p in (*first.parameters(), *last.parameters())]
    expected = torch.autograd.grad(
        (x + last(first(x).relu())).square().sum(), [*first.parameters(), *last.parameters()]
    )
    torch.testing.assert_close(grads, list(expected), rtol=1e-13, atol=1e-13)


def test_without_gradients_nothing_is_kept():
    module = layer()
    with torch.no_grad():
        assert accumulating(module)(torch.ones(5, dtype=torch.float64)).grad_fn is None
    module.requires_grad_(False)
    assert accumulating(module)(torch.ones(5, dtype=torch.float64)).grad_fn is None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the older weight_norm
def test_only_torchs_own_layers_are_plain():
    class Scaled(nn.Linear):
        pass

    forward_of_its_own = layer()
    forward_of_its_own.forward = forward_of_its_own.forward
    others = [
        Scaled(5, 7),
        nn.Conv1d(5, 7, 1),
        nn.utils.parametrizations.weight_norm(layer()),
        nn.utils.weight_norm(layer()),
        nn.LazyLinear(7),
        forward_of_its_own,
    ]
    assert is_plain(layer())
    assert not any(is_plain(module) for module in others)


# -- in a step ------------------------------------------------------------------------------------


def step_gradients(model: nn.Module, ids: torch.Tensor, **settings: Any):
    with oomb.Engine(model, oomb.EngineConfig(**{**SIZES, **settings})) as engine:
        engine.step(ids)
        grads = gradients(model)
        model.zero_grad(set_to_none=True)
    return grads


def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, 29), generator=torch.Generator().manual_seed(3))


def lora(dtype: torch.dtype) -> nn.Module:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"])
    model = peft.get_peft_model(tiny_model("qwen2", dtype), adapter)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return model


def with_module_hooks(dtype: torch.dtype) -> nn.Module:
    model = tiny_model("qwen2", dtype)
    gate = model.model.layers[0].mlp.gate_proj
    gate.register_forward_hook(lambda module, args, out: out * 1.5)
    gate.register_full_backward_hook(lambda module, to_input, to_output: (to_input[0] * 0.5,))
    return model


MODELS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "qwen2": lambda dtype: tiny_model("qwen2", dtype),
    "tied": lambda dtype: tiny_model("llama", dtype, tie_word_embeddings=True),
    "experts": lambda dtype: tiny_model("qwen3_moe", dtype),
    "lora": lora,
    "hooks on modules": with_module_hooks,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_a_step_equals_one_whose_weights_are_left_to_autograd(name, policy, monkeypatch):
    model = MODELS[name](torch.float32)
    ours = step_gradients(model, ids(), activation_policy=policy)
    monkeypatch.setattr("oomb.installed.accumulating", lambda module: module.forward)
    theirs = step_gradients(model, ids(), activation_policy=policy)
    error, parameter = worst_error(ours, theirs)
    assert error < 2e-5, parameter


def test_every_linear_weight_of_a_step_accumulates_in_place(monkeypatch):
    reached = []

    def add(weight, *arguments, **keywords):
        reached.append(weight)
        add_weight_gradient(weight, *arguments, **keywords)

    monkeypatch.setattr(linear, "add_weight_gradient", add)
    model = tiny_model("qwen2", torch.float32)
    step_gradients(model, ids(), chunk_size=8)
    weights = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    assert set(reached) == weights
    layers = weights - {model.lm_head.weight}
    assert all(sum(w is r for r in reached) == 4 for w in layers)  # 29 tokens in chunks of 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gemms_of_halves_are_summed_in_fp32(dtype):
    weight = nn.Parameter(torch.zeros(64, 48, dtype=dtype, device="cuda"))
    weight.grad_dtype = torch.float32
    exact = torch.zeros(64, 48, dtype=torch.float64, device="cuda")
    for _ in range(3):
        grad_output = torch.randn(1024, 64, device="cuda").to(dtype)
        inputs = torch.randn(1024, 48, device="cuda").to(dtype)
        add_weight_gradient(weight, grad_output, inputs, alpha=2.0**-20)
        exact += 2.0**-20 * (grad_output.double().T @ inputs.double())
    assert weight.grad.dtype == torch.float32
    assert relative_error(weight.grad.double(), exact) < 1e-5
