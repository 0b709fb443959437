"""Parameters' gradients around a step: dtype, hooks, and what happens when it is abandoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Parameters whose gradient holds part of an abandoned step, until it is zeroed.
_INCOMPLETE = WeakTensorKeyDictionary()


class GradientLedger:
    """Prepares `.grad` for a step, and settles it at the end: kept whole, or as it was before.

    Hooks of `register_post_accumulate_grad_hook` would fire once per chunk; they are held back and
    called once, when the gradient is complete.
    """

    def __init__(self, model: torch.nn.Module, grad_dtype: torch.dtype, *, restore: bool) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._grad_dtype = grad_dtype
        self._restore = restore
        self._before: dict[str, torch.Tensor | None] = {}
        self._hooks: dict[str, dict[int, Callable]] = {}

    def check(self) -> None:
        """Refuse a model whose gradients cannot take a step; nothing is changed.

        Raises:
            RuntimeError: a gradient still holds part of an abandoned step.
            TypeError: an existing gradient has another dtype than the step would give it.
            ValueError: a parameter has a hook that needs its whole gradient at once.
        """
        if not self._parameters:
            raise ValueError(
                "model must have at least one parameter with requires_grad=True, got none; "
                "to measure the loss alone use engine.evaluate"
            )
        for name, parameter in self._parameters.items():
            if parameter._backward_hooks:
                raise ValueError(
                    f"parameter {name} has a register_hook hook, which would see one chunk's "
                    "gradient at a time; use register_post_accumulate_grad_hook"
                )
            grad, dtype = parameter.grad, self._dtype(parameter)
            if grad is None:
                _INCOMPLETE.pop(parameter, None)
                continue
            if parameter in _INCOMPLETE:
                if bool(grad.count_nonzero()):
                    raise RuntimeError(
                        f"the gradient of {name} holds part of a step that did not finish; zero "
                        "the gradients before the next step (or use restore_grads=True)"
                    )
                del _INCOMPLETE[parameter]
            if grad.dtype != dtype:
                raise TypeError(
                    f"the gradient of {name} must have dtype {dtype} (grad_dtype), got "
                    f"{grad.dtype}; set it to None or use grad_dtype={grad.dtype}"
                )

    def open(self) -> None:
        """Make parameters accumulate in the wanted dtype, and hold their hooks back."""
        for name, parameter in self._parameters.items():
            self._before[name] = parameter.grad
            if parameter.grad is not None and self._restore:
                parameter.grad = None
            if parameter.grad is None:
                parameter.grad_dtype = self._dtype(parameter)
            hooks = parameter._post_accumulate_grad_hooks
            if hooks:
                self._hooks[name] = dict(hooks)
                hooks.clear()

    def commit(self) -> None:
        """The step is whole: add what was set aside, and call the hooks that waited."""
        for name, parameter in self._parameters.items():
            before = self._before[name]
            if self._restore and before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._give_hooks_back()
        for name in self._hooks:
            parameter = self._parameters[name]
            if parameter.grad is not None:
                for hook in list(parameter._post_accumulate_grad_hooks.values()):
                    hook(parameter)

    def roll_back(self) -> None:
        """The step was abandoned: undo what can be undone, and mark the rest."""
        for name, parameter in self._parameters.items():
            before = self._before[name]
            if before is None or self._restore:
                parameter.grad = before
            else:
                _INCOMPLETE[parameter] = True
        self._give_hooks_back()

    def _give_hooks_back(self) -> None:
        for name, hooks in self._hooks.items():
            self._parameters[name]._post_accumulate_grad_hooks.update(hooks)

    def _dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.promote_types(parameter.dtype, self._grad_dtype)


def restore_grad_dtypes(dtypes: list[tuple[torch.Tensor, Any]]) -> None:
    """Give parameters without a gradient their former `grad_dtype`; gradients stay the user's."""
    for parameter, dtype in dtypes:
        if parameter.grad is None:
            parameter.grad_dtype = dtype
