"""The seam to transformers: how the engine gets inside a model, and leaves it as it was.

transformers looks attention up by name in its AttentionInterface. OOMB registers one name; the
function behind it finds the engine that is at work by the attention module it is called for. A
model is switched to that name only while a chunk is being computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "oomb"
SINK = "s_aux"  # the keyword that brings a layer's sinks
IMPLEMENTATION = "_attn_implementation_internal"  # behind config._attn_implementation

AttentionHandler = Callable[..., torch.Tensor]
"""Called as handler(module, query, key, value, mask, scaling, dropout, keywords)."""

_HANDLERS: weakref.WeakKeyDictionary[nn.Module, AttentionHandler] = weakref.WeakKeyDictionary()
_ABSENT = object()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: the handler of the engine at work answers."""
    handler = _HANDLERS.get(module)
    if handler is None:
        raise RuntimeError(
            f"attention implementation '{NAME}' works inside oomb.Engine only; use "
            "engine.step(...), or set another attn_implementation"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return handler(module, query, key, value, attention_mask, scaling, dropout, keywords), None


AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class CausalLM:
    """The parts of a causal language model that the engine works with.

    Attributes:
        whole: the model with its head.
        base: the model inside it that turns token ids into hidden states.
    """

    whole: PreTrainedModel
    base: nn.Module

    @property
    def device(self) -> torch.device:
        return next(self.whole.parameters()).device

    @property
    def vocab_size(self) -> int:
        return self.whole.get_input_embeddings().num_embeddings

    @contextmanager
    def attention_by(
        self, modules: Iterable[nn.Module], handler: AttentionHandler, implementation: str = NAME
    ) -> Iterator[None]:
        """Send the attention of `modules` to `handler`, under a name that is registered for it."""
        with Switch() as switch:
            for module in self.whole.modules():
                config = getattr(module, "config", None)
                if hasattr(config, IMPLEMENTATION):
                    switch.set(config, IMPLEMENTATION, implementation)
                if getattr(module, "gradient_checkpointing", False):
                    switch.set(module, "gradient_checkpointing", False)  # the engine has its own
            for module in modules:
                _HANDLERS[module] = handler
                switch.undo(lambda module=module: _HANDLERS.pop(module, None))
            yield

    def hidden_states(self, ids: torch.Tensor, positions: torch.Tensor, **extra: Any) -> Any:
        """The base model's output for token ids [B, n] at positions [B, n], without a cache."""
        return self.base(
            input_ids=ids, position_ids=positions, use_cache=False, return_dict=True, **extra
        )

    @contextmanager
    def head(self, output_class: type) -> Iterator[Callable[[torch.Tensor, torch.Tensor], Any]]:
        """The way from hidden states to logits, through the model's own forward.

        The base model is replaced by a stub that returns the hidden states it is given, so that
        whatever the family does to its logits (scales, softcaps) is done.
        """
        given: list[torch.Tensor] = []

        def stub(*args: Any, **kwargs: Any) -> Any:
            return output_class(last_hidden_state=given[0])

        def logits(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            given[:] = [hidden]
            output = self.whole(input_ids=ids, use_cache=False, return_dict=True, **self._no_router)
            return output.logits

        with Switch() as switch:
            switch.set(self.base, "forward", stub)
            yield logits
            given.clear()

    @property
    def _no_router(self) -> dict[str, bool]:
        """Keywords that keep a mixture-of-experts head from asking for router logits."""
        has_router = hasattr(self.whole.config, "output_router_logits")
        return {"output_router_logits": False} if has_router else {}


class Switch:
    """Sets attributes inside a `with` block and puts back exactly what was there."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the block ends; one that the instance lacked is deleted then."""
        before = vars(owner).get(name, _ABSENT)
        if before is _ABSENT:
            self.undo(lambda: vars(owner).pop(name, None))
        else:
            self.undo(lambda: vars(owner).__setitem__(name, before))
        vars(owner)[name] = value

    def undo(self, action: Callable[[], Any]) -> None:
        """Do this when the block ends."""
        self._undo.append(action)

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *exc: Any) -> None:
        while self._undo:
            self._undo.pop()()


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model in what the user passed: the model itself, or inside PEFT's.

    Args:
        model: what the user passed.

    Returns:
        The causal language model with its head.

    Raises:
        TypeError: it is no transformers model.
        ValueError: it has no language-model head, or its parameters lie on several devices.
    """
    whole = model
    if getattr(model, "peft_config", None) and hasattr(model, "get_base_model"):
        kinds = {name: c for name, c in model.peft_config.items() if c.is_prompt_learning}
        if kinds:
            raise ValueError(
                f"model must use adapters inside its layers (LoRA), got prompt learning "
                f"({', '.join(kinds)}), which adds tokens the engine does not see"
            )
        whole = model.get_base_model()
    if not isinstance(whole, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers causal language model, got {type(model).__name__}; "
            "load it with AutoModelForCausalLM"
        )
    if whole.config.is_encoder_decoder or whole.get_output_embeddings() is None:
        raise ValueError(
            f"model must be a causal language model with a head, got {type(whole).__name__}; "
            "load it with AutoModelForCausalLM"
        )
    devices = sorted({str(p.device) for p in whole.parameters()})
    if len(devices) != 1 or devices[0] == "meta":
        raise ValueError(f"model must lie on one device, got parameters on {', '.join(devices)}")
    return whole


def layer_of(model: nn.Module, attention: nn.Module) -> nn.Module:
    """The decoder layer around an attention module: the nearest that sits in a ModuleList."""
    path = next(name for name, module in model.named_modules() if module is attention)
    while path:
        parent, _, _ = path.rpartition(".")
        if isinstance(model.get_submodule(parent), nn.ModuleList):
            return model.get_submodule(path)
        path = parent
    return attention


@contextmanager
def without_traces(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run a model without gradients, in training or evaluation mode, and leave it as it was.

    Every module's mode comes back, and so do the random generators.
    """
    device = next(model.parameters()).device
    before = {module: module.training for module in model.modules()}
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.train(training)
        try:
            yield
        finally:
            for module, was in before.items():
                module.training = was
