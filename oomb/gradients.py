"""Parameters' gradients around a step: dtype, hooks, and what happens when it is abandoned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Gradients that hold part of an abandoned step, until they are zeroed.
_INCOMPLETE = WeakTensorKeyDictionary()
# Parameters whose grad_dtype is changed, and what it was.
_FORMER_DTYPES = WeakTensorKeyDictionary()


class GradientLedger:
    """Prepares `.grad` for a step, and settles it at the end: kept whole, or as it was before.

    Hooks of `register_post_accumulate_grad_hook` would fire once per chunk; they are held back
    while a chunk is computed, and called once, when the gradient is complete.
    """

    def __init__(self, model: torch.nn.Module, grad_dtype: torch.dtype, *, restore: bool) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._grad_dtype = grad_dtype
        self._restore = restore
        self._before: dict[str, tuple[torch.Tensor, int] | None] = {}

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
                continue
            if grad in _INCOMPLETE:
                values = grad.coalesce().values() if grad.is_sparse else grad
                if bool(values.count_nonzero()):
                    raise RuntimeError(
                        f"the gradient of {name} holds part of a step that did not finish; zero "
                        "the gradients before the next step (or use restore_grads=True)"
                    )
                del _INCOMPLETE[grad]
            if grad.dtype != dtype:
                raise TypeError(
                    f"the gradient of {name} must have dtype {dtype} (grad_dtype), got "
                    f"{grad.dtype}; set it to None or use grad_dtype={grad.dtype}"
                )

    def open(self) -> None:
        """Make parameters accumulate in the wanted dtype, beside what is there or onto it."""
        self.check()  # things may have changed since the step's arguments were checked
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            self._before[name] = None if grad is None else (grad, grad._version)
            if self._restore:
                parameter.grad = None
            if parameter.grad is None:
                _set_grad_dtype(parameter, self._dtype(parameter))

    @contextmanager
    def hooks_held_back(self) -> Iterator[None]:
        """While a chunk is computed, no post-accumulate hook fires."""
        held = []
        for parameter in self._parameters.values():
            hooks = parameter._post_accumulate_grad_hooks
            if hooks:
                held.append((hooks, dict(hooks)))
                hooks.clear()
        try:
            yield
        finally:
            for hooks, former in held:
                hooks.update(former)

    def commit(self) -> None:
        """The step is whole: add what was set aside, and call the hooks that waited."""
        reached = [n for n, p in self._parameters.items() if self._was_reached(n, p)]
        for name, parameter in self._parameters.items():
            before = self._before[name]
            if self._restore and before is not None:
                grad = parameter.grad
                parameter.grad = before[0] if grad is None else before[0].add_(grad)
        with torch.no_grad():  # as autograd calls them
            for name in reached:
                parameter = self._parameters[name]
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)

    def roll_back(self) -> None:
        """The step was abandoned: undo what can be undone, and mark the rest."""
        for name, before in self._before.items():  # none where the step was refused as it began
            parameter = self._parameters[name]
            if before is None or self._restore:
                parameter.grad = None if before is None else before[0]
                give_back_grad_dtype(parameter)
            elif self._was_reached(name, parameter):
                _INCOMPLETE[parameter.grad] = True

    def _was_reached(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether the step added to a parameter's gradient."""
        grad, before = parameter.grad, self._before[name]
        if grad is None or before is None:
            return grad is not None
        return grad is not before[0] or grad._version != before[1]

    def _dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.promote_types(parameter.dtype, self._grad_dtype)


def _set_grad_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    if parameter.grad_dtype != dtype:
        if parameter not in _FORMER_DTYPES:
            _FORMER_DTYPES[parameter] = parameter.grad_dtype
        parameter.grad_dtype = dtype


def give_back_grad_dtype(parameter: torch.Tensor) -> None:
    """Undo the change of a parameter's `grad_dtype`.

    One that holds a gradient is left alone: torch lets no gradient stand under another dtype.
    """
    if parameter.grad is None and parameter in _FORMER_DTYPES:
        parameter.grad_dtype = _FORMER_DTYPES.pop(parameter)
