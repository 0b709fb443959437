"""Linear layers whose weight gradient is added to `.grad` by the GEMM that computes it.

Autograd makes a weight's gradient in the weight's dtype and then adds it to `.grad`. A step does so
for every weight and chunk: for a bf16 weight with an fp32 `.grad`, each chunk's term is rounded to
bf16, and 20 bytes move (product, cast, sum) where the GEMM alone moves 8. Here the GEMM's own fp32
sums are added to `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HALVES = (torch.bfloat16, torch.float16)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's own linear layer, with a parameter of its own for a weight.

    Parametrised and quantised layers are of other types, or keep their weight elsewhere.
    """
    weight = module._parameters.get("weight")
    return (
        type(module) is nn.Linear and type(weight) is nn.Parameter and "forward" not in vars(module)
    )


def accumulating(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """A plain linear layer's forward; its backward adds the weight's gradient to `.grad`."""

    def run(input: torch.Tensor) -> torch.Tensor:  # named as nn.Linear names it
        weight, bias = module.weight, module.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return functional.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, (_Kept.apply(input, weight),))

    return run


@torch.no_grad()
def add_weight_gradient(
    weight: torch.Tensor, grad_output: torch.Tensor, inputs: torch.Tensor, alpha: float = 1.0
) -> None:
    """weight.grad += alpha * grad_output^T @ inputs.

    Where there is no gradient yet, the product becomes it, in the weight's `grad_dtype`.

    Args:
        weight: [out, in].
        grad_output: [n, out] in the dtype of `inputs`.
        inputs: [n, in].
        alpha: applied to the GEMM's sums, so that what is tiny in fp16 is not lost before.
    """
    grad, left = weight.grad, grad_output.T
    dtype = weight.grad_dtype if grad is None else grad.dtype
    if dtype != inputs.dtype and not _widens(inputs, dtype):
        add_gradient(weight, left @ inputs, alpha)
    elif grad is None:
        product = (
            left @ inputs if dtype == inputs.dtype else torch.mm(left, inputs, out_dtype=dtype)
        )
        weight.grad = product if alpha == 1.0 else product.mul_(alpha)
    elif dtype == inputs.dtype:
        grad.addmm_(left, inputs, alpha=alpha)
    else:
        torch.addmm(grad, left, inputs, out_dtype=dtype, alpha=alpha, out=grad)


@torch.no_grad()
def add_gradient(parameter: torch.Tensor, term: torch.Tensor, alpha: float = 1.0) -> None:
    """parameter.grad += alpha * term, as autograd adds: into what is there, or as the first."""
    if parameter.grad is None:
        term = term.to(parameter.grad_dtype)
        parameter.grad = term if alpha == 1.0 else term * alpha
    else:
        parameter.grad.add_(term, alpha=alpha)


def _widens(inputs: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a GEMM of such inputs can give this dtype: on CUDA, halves are summed in fp32."""
    return inputs.is_cuda and inputs.dtype in HALVES and dtype == torch.float32


class _Kept(torch.autograd.Function):
    """Saves a layer's inputs before its GEMM runs.

    When a checkpointed layer runs again, it stops at the last tensor that it has to save. A
    Function saves after its forward: with one alone, the layer's last GEMM would run for nothing.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor; its `grad_fn`, alive as long as it is, holds the inputs."""
        ctx.save_for_backward(inputs)
        return inputs.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> tuple[None, None]:
        """Never runs: nothing is computed from the empty tensor."""
        return None, None


class _Linear(torch.autograd.Function):
    """inputs [..., in], weight [out, in], bias [out] or None -> [..., out]."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kept: tuple[torch.Tensor],
    ) -> torch.Tensor:
        """The layer's output; the tensor in `kept`, hidden from autograd, holds its inputs."""
        ctx.set_materialize_grads(False)  # an output without gradient reaches no weight
        ctx.weight, ctx.kept = weight, kept  # a saved weight would come back without its `.grad`
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of inputs and bias; the weight's is in its `.grad` already."""
        if grad_output is None:
            return None, None, None, None
        (inputs,) = ctx.kept[0].grad_fn.saved_tensors
        ctx.kept = None  # the graph lives longer than the inputs need to
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        add_weight_gradient(ctx.weight, rows, inputs.reshape(-1, inputs.shape[-1]))
        grad_inputs = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_inputs = (rows @ ctx.weight).view(inputs.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_inputs, None, grad_bias, None
