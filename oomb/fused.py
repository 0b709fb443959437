"""Fused kernels in place of a model's own RMSNorm, SwiGLU and RoPE, where they are as exact.

A model's code runs these as many small kernels, each of which reads and writes whole activations.
Which fused function computes the same is not concluded from a model's name: each is run beside the
model's own code, and beside that code in a wider dtype, when the engine is attached.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from oomb.hf import CausalLM, Switch, without_traces
from oomb.probes.facts import ModelFacts
from oomb.randomness import RandomState

log = logging.getLogger("oomb")

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor | Tensors]

ROPE = "apply_rotary_pos_emb"
"""transformers' modules look their RoPE up by this global name."""
NORMS = ((0.0, "llama"), (1.0, "gemma"), (0.0, "gemma"))
"""(offset, casting) of the RMSNorms there are: weight or 1 + weight, in its own dtype or fp32."""
FP32_ROUNDING = 5e-7
"""Norms compute in fp32 even in an fp64 model, so the numbers compared with are no better."""
TOKENS = 37
NARROW, MANY_ROWS = 256, 32773
"""A norm per head is narrow and has many rows, for which fused functions have other kernels."""


@dataclass(frozen=True)
class FusedFunctions:
    """Differentiable fused functions.

    Attributes:
        rms_norm: (x [..., d], weight [d], eps=, offset=, casting=) -> [..., d].
        silu_mul: (a, b) -> silu(a) * b; its backward may overwrite a and b.
        rope: (q [B, H, n, D], k [B, G, n, D], cos, sin [1 or B, n, D]) -> q and k, turned; it may
            overwrite q and k, and its backward their gradients.
    """

    rms_norm: Function
    silu_mul: Function
    rope: Function


@dataclass(frozen=True)
class Replacement:
    """An attribute to be set while a chunk is computed.

    Attributes:
        name: of the fused kernel behind it.
        owner: a module of the model, or the Python module that its code is in.
        attribute: name of the attribute.
        value: what it is set to.
    """

    name: str
    owner: Any
    attribute: str
    value: Function


def liger_functions(device: torch.device, dtype: torch.dtype) -> FusedFunctions | None:
    """liger-kernel's functions.

    Args:
        device: where the model lives.
        dtype: dtype of its activations.

    Returns:
        The functions, or None where they are not installed or cannot run.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    try:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction
    except ImportError:
        return None

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float, casting: str
    ) -> torch.Tensor:
        # Not in place: a norm behind a sublayer shares its gradient with the residual. What the
        # other two overwrite, projections' outputs and attention's gradients, nobody else reads.
        return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)

    return FusedFunctions(rms_norm, LigerSiLUMulFunction.apply, LigerRopeFunction.apply)


def find_replacements(
    model: CausalLM, facts: ModelFacts, functions: FusedFunctions
) -> list[Replacement]:
    """Every part of a model that a fused function computes as exactly as the model's own code.

    The logger `oomb` says which do not, and why. Gradients and random states stay as they are.

    Args:
        model: the model.
        facts: what the probe found.
        functions: the fused functions.

    Returns:
        What to set while a chunk is computed.
    """
    with torch.inference_mode(False), without_traces(model.whole, training=True):
        return [
            *_norms(model, facts, functions.rms_norm),
            *_gated_mlps(model, facts, functions.silu_mul),
            *_ropes(model, facts, functions.rope),
        ]


# -- RMSNorm --------------------------------------------------------------------------------------


def _norms(model: CausalLM, facts: ModelFacts, rms_norm: Function) -> Iterator[Replacement]:
    for modules in _alike(
        model.whole, _is_norm, lambda m: (m.weight.shape, m.weight.dtype, _eps(m))
    ):
        fused = _matching_norm(modules[0], facts.layers[0].shape.dtype, rms_norm)
        if fused is not None:
            for module in modules:
                yield Replacement("rms_norm", module, "forward", _norm_forward(module, fused))


def _is_norm(module: nn.Module) -> bool:
    """Whether a module looks like an RMSNorm of one tensor; its numbers tell whether it is one."""
    weight = module._parameters.get("weight")
    return (
        "RMSNorm" in type(module).__name__
        and type(weight) is nn.Parameter
        and weight.ndim == 1
        and isinstance(_eps(module), float)
        and _takes_one_tensor(module)
    )


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _matching_norm(module: nn.Module, dtype: torch.dtype, rms_norm: Function) -> Function | None:
    """The fused norm in the variant that this module is, or None."""
    obstacles = []
    for offset, casting in NORMS:
        fused = partial(rms_norm, eps=_eps(module), offset=offset, casting=casting)
        obstacle = _obstacle(lambda fused=fused: [_norm_difference(module, dtype, fused)])
        if obstacle is None:
            return fused
        obstacles.append(f"as weight + {offset:g} in {casting}'s dtypes, {obstacle}")
    _report("rms_norm", module, "; ".join(obstacles))
    return None


def _norm_difference(module: nn.Module, dtype: torch.dtype, fused: Function) -> Difference:
    weight = module.weight.detach()
    rows = MANY_ROWS if len(weight) <= NARROW else TOKENS
    twin = copy.deepcopy(module)

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(twin, {"weight": weight}, (x,))

    return _difference(own, fused, [_random((1, rows, len(weight)), dtype, weight.device), weight])


def _norm_forward(module: nn.Module, fused: Function) -> Function:
    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return fused(hidden_states, module.weight)

    return forward


# -- SwiGLU ---------------------------------------------------------------------------------------


def _gated_mlps(model: CausalLM, facts: ModelFacts, silu_mul: Function) -> Iterator[Replacement]:
    dtype, device = facts.layers[0].shape.dtype, model.device
    for modules in _alike(model.whole, _is_gated_mlp, lambda m: type(m.act_fn)):
        like = modules[0]

        def differences(like: nn.Module = like) -> Iterator[Difference]:
            yield _composition_difference(like, dtype, device)
            yield _gating_difference(like, silu_mul, dtype, device)

        if _is_exact("swiglu", like, differences):
            for module in modules:
                yield Replacement("swiglu", module, "forward", _mlp_forward(module, silu_mul))


def _is_gated_mlp(module: nn.Module) -> bool:
    return (
        all(name in module._modules for name in ("gate_proj", "up_proj", "down_proj"))
        and "silu" in type(getattr(module, "act_fn", None)).__name__.lower()
        and _takes_one_tensor(module)
    )


def _composition_difference(
    module: nn.Module, dtype: torch.dtype, device: torch.device
) -> Difference:
    """An MLP must be its layers around one product, bit for bit, and drop nothing beside."""
    x = _random((1, TOKENS, module.gate_proj.in_features), dtype, device)
    random = RandomState.capture(device)
    own = module(x)
    random.restore()  # dropout inside the layers is drawn alike
    same = torch.equal(_mlp_forward(module, lambda a, b: module.act_fn(a) * b)(x), own)
    return Difference(0.0 if same else float("inf"), 0.0)


def _gating_difference(
    module: nn.Module, silu_mul: Function, dtype: torch.dtype, device: torch.device
) -> Difference:
    """The product alone: the layers around it are the model's own either way."""
    shape = (1, TOKENS, module.down_proj.in_features)
    inputs = [_random(shape, dtype, device, seed=seed) for seed in range(2)]
    return _difference(lambda a, b: module.act_fn(a) * b, silu_mul, inputs)


def _mlp_forward(module: nn.Module, silu_mul: Function) -> Function:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))

    return forward


# -- RoPE -----------------------------------------------------------------------------------------


def _ropes(model: CausalLM, facts: ModelFacts, rope: Function) -> Iterator[Replacement]:
    spaces = dict.fromkeys(sys.modules[type(layer.module).__module__] for layer in facts.layers)
    for space in spaces:
        own = getattr(space, ROPE, None)
        if own is None:
            continue

        def differences(space: Any = space, own: Function = own) -> Iterator[Difference]:
            for arguments in _rope_calls(model, facts, space):
                yield _rope_difference(own, rope, *arguments)

        if _is_exact("rope", own, differences):
            yield Replacement("rope", space, ROPE, _rope_forward(own, rope))


def _rope_forward(own: Function, rope: Function) -> Function:
    def forward(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor | Tensors:
        # Liger steps through memory by the stride of the token dimension, which may be any number
        # where there is one token.
        return own(q, k, cos, sin) if q.shape[2] == 1 else rope(q, k, cos, sin)

    return forward


def _rope_calls(model: CausalLM, facts: ModelFacts, space: Any) -> list[Tensors]:
    """Arguments of the calls that a small forward makes, one of each kind."""
    calls: dict[tuple, Tensors] = {}
    own = getattr(space, ROPE)

    def watched(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        kind = (q.shape, k.shape, q.dtype, cos.shape, cos.dtype, float(cos.double().sum()))
        calls.setdefault(kind, (q, k, cos, sin))
        return own(q, k, cos, sin)

    def no_attention(module: nn.Module, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return query.transpose(1, 2)

    ids = torch.zeros((2, TOKENS), dtype=torch.int64, device=model.device)
    columns = torch.arange(TOKENS, device=model.device)
    modules = [layer.module for layer in facts.layers]
    with model.attention_by(modules, no_attention), Switch() as switch:
        switch.set(space, ROPE, watched)
        model.hidden_states(ids, torch.stack([columns, columns + TOKENS]))
    return list(calls.values())


def _rope_difference(
    own: Function,
    rope: Function,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> Difference:
    def by(function: Function) -> Function:
        def run(*heads: torch.Tensor) -> torch.Tensor | Tensors:
            angles = (x if x.dtype != q.dtype else x.to(heads[0].dtype) for x in (cos, sin))
            return function(*(x.transpose(1, 2) for x in heads), *angles)

        return run

    inputs = [  # [B, n, heads, D], as projections lay them out
        _random(tuple(x.transpose(1, 2).shape), x.dtype, x.device, seed=seed)
        for seed, x in enumerate((q, k))
    ]
    return _difference(by(own), by(rope), inputs)


# -- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A fused function's relative error in the output or gradient where it is worst, and its limit.

    Attributes:
        error: the relative error.
        allowed: the largest that is as exact as the model's own code.
    """

    error: float
    allowed: float


def _is_exact(name: str, part: Any, differences: Callable[[], Iterable[Difference]]) -> bool:
    """Whether there are differences and each is allowed; the logger says why not."""
    obstacle = _obstacle(differences)
    if obstacle is not None:
        _report(name, part, obstacle)
    return obstacle is None


def _obstacle(differences: Callable[[], Iterable[Difference]]) -> str | None:
    """Why a fused function may not be used, as part of a sentence."""
    obstacle: str | None = "the model does not call it"
    try:
        for found in differences():
            if not found.error <= found.allowed:
                return (
                    f"its relative error is {found.error:.1e}, at most {found.allowed:.1e} expected"
                )
            obstacle = None
    except Exception as error:  # a kernel that does not compile on this GPU, a layer called oddly
        obstacle = f"{type(error).__name__}: {error}"
    return obstacle


def _report(name: str, part: Any, obstacle: str) -> None:
    replaced = getattr(part, "__name__", type(part).__name__)
    log.info("fused kernel %s does not replace %s: %s", name, replaced, obstacle)


def _difference(own: Function, fused: Function, inputs: Sequence[torch.Tensor]) -> Difference:
    """Compare a fused function with the model's own, both against its own in a wider dtype.

    Args:
        own: takes the inputs, or the inputs in a wider dtype.
        fused: takes the inputs.
        inputs: tensors, each to get a gradient.

    Returns:
        The difference that is largest by what it may be: twice the error of the model's own code,
        and some rounding.
    """
    wider = torch.float64 if any(x.dtype == torch.float32 for x in inputs) else torch.float32
    exact = _outputs_and_gradients(own, [x.to(wider) for x in inputs])
    theirs, ours = (_outputs_and_gradients(function, inputs) for function in (own, fused))
    found = []
    for truth, their, our in zip(exact, theirs, ours, strict=True):
        if our.shape != their.shape or our.dtype != their.dtype:
            return Difference(float("inf"), 0.0)
        rounding = max(torch.finfo(their.dtype).eps / 4, FP32_ROUNDING)
        allowed = 2 * _relative_error(their, truth) + rounding
        found.append(Difference(_relative_error(our, truth), allowed))
    return max(
        found, key=lambda each: each.error / each.allowed if each.error >= 0 else float("inf")
    )


def _outputs_and_gradients(function: Function, inputs: Sequence[torch.Tensor]) -> Tensors:
    with torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(
            *(leaf.clone() for leaf in leaves)
        )  # clones, since it may overwrite them
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        values = [out.detach().clone() for out in outputs]
        seeds = [
            _random(tuple(out.shape), out.dtype, out.device, seed=10 + number)
            for number, out in enumerate(outputs)
        ]
        return *values, *torch.autograd.grad(outputs, leaves, seeds)


def _relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def _random(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> torch.Tensor:
    """Normal numbers from a generator of their own, the same in every dtype: they fit bf16."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
    return wide.to(torch.bfloat16).to(dtype)


def _alike(
    whole: nn.Module, wanted: Callable[[nn.Module], bool], traits: Callable[[nn.Module], Any]
) -> list[list[nn.Module]]:
    """The wanted modules of a model, those of one class and the same traits together."""
    kinds: dict[tuple, list[nn.Module]] = {}
    for module in whole.modules():
        if wanted(module):
            kinds.setdefault((type(module), traits(module)), []).append(module)
    return list(kinds.values())


def _takes_one_tensor(module: nn.Module) -> bool:
    """Whether a forward is the class's own and has one argument."""
    one = len(inspect.signature(module.forward).parameters) == 1
    return one and "forward" not in vars(module)
