"""A picture of a model before and after: what the engine changes and leaves changed shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import oomb.engine  # noqa: F401 - registers a name with transformers, once for good

PLAIN = (str, int, float, bool, type(None), torch.dtype)


@dataclass(frozen=True, eq=False)
class Same:
    """Equal only to the very same object, in the same version where it is a tensor."""

    value: Any
    version: int | None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Same) and self.value is other.value and self.version == other.version
        )

    __hash__ = None


def picture(model: nn.Module, *, gradients: bool = True) -> dict[str, Any]:
    """Everything that hangs on a model and its seams to transformers, by name.

    Args:
        model: the model.
        gradients: whether gradients and their dtypes belong to the picture.
    """
    seen: dict[str, Any] = {
        "random": torch.get_rng_state().tolist(),
        "attention names": sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
        "own attention names": sorted(AttentionInterface._global_mapping),
        "mask names": sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
        "own mask names": sorted(AttentionMaskInterface._global_mapping),
    }
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            seen[f"{path}.{name}"] = _print(value)
        if hasattr(module, "config"):
            seen[f"{path}.config.to_dict()"] = module.config.to_dict()
            for name, value in vars(module.config).items():
                seen[f"{path}.config.{name}"] = _print(value)
    for name, parameter in model.named_parameters():
        seen[f"{name}.requires_grad"] = parameter.requires_grad
        seen[f"{name} hooks"] = _print(parameter._backward_hooks or {})
        seen[f"{name} late hooks"] = _print(parameter._post_accumulate_grad_hooks or {})
        if gradients:
            seen[f"{name}.grad"] = _print(parameter.grad)
            seen[f"{name}.grad_dtype"] = parameter.grad_dtype
    return seen


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs, appeared or vanished."""
    missing = object()
    return sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name, missing) != after.get(name, missing)
    )


def _print(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return [(key, _print(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_print(item) for item in value]
    return Same(value, value._version if isinstance(value, torch.Tensor) else None)
