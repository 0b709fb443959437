"""The model with the engine inside.

Attention is redirected, layers are checkpointed, weight gradients accumulate in place, parts run as
fused kernels and show themselves as stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from oomb.activations import LayerReplay, checkpointed
from oomb.fill_ending import FillEnding
from oomb.fused import Replacement
from oomb.hf import AttentionHandler, CausalLM, Switch, layer_of
from oomb.linear import accumulating, is_plain
from oomb.probes import ModelFacts
from oomb.profiling.backward import show_backward
from oomb.profiling.stage import stage


class InstalledModel:
    """Knows a model's decoder layers, and switches the engine in for as long as a chunk takes.

    Args:
        model: the model.
        facts: what its probe found.
        activation_policy: what a chunk keeps between its forward and its backward.
        replacements: fused kernels in place of the model's own code.
        linear_head: the layer that alone makes logits, if their loss is to be computed from it.

    Attributes:
        model: the model.
        facts: what its probe found.
        numbers: layer number of each attention module.
        replays: per layer number, the memory of its decoder layer between forward and backward.
        replacements: as given.
        linear_head: as given.
    """

    def __init__(
        self,
        model: CausalLM,
        facts: ModelFacts,
        activation_policy: str,
        replacements: Sequence[Replacement] = (),
        linear_head: nn.Linear | None = None,
    ) -> None:
        self.model = model
        self.facts = facts
        self.linear_head = linear_head
        self.replacements = replacements
        self._linears = [m for m in model.whole.modules() if type(m) is nn.Linear]
        self.numbers = {layer.module: n for n, layer in enumerate(facts.layers)}
        self._checkpoints = activation_policy != "keep"
        self._decoders: dict[nn.Module, LayerReplay] = {}
        self.replays: list[LayerReplay] = []
        self._staged: list[tuple[nn.Module, str, int]] = []
        for number, layer in enumerate(facts.layers):
            decoder = layer_of(model.whole, layer.module)
            replay = self._decoders.setdefault(decoder, LayerReplay(activation_policy))
            self.replays.append(replay)
            self._staged.append((layer.module, "projection", number))
            mlp = _mlp(decoder, layer.module)
            if mlp is not None:
                self._staged.append((mlp, "mlp", number))

    @contextmanager
    def switched_in(
        self, handler: AttentionHandler, ending: FillEnding | None = None
    ) -> Iterator[None]:
        """Inside, the model's attention is `handler` and its layers follow the activation policy.

        The backward pass of what is computed inside must run inside too. In the fill, `ending`
        wraps the last layer.
        """
        with self.model.attention_by(self.numbers, handler), Switch() as switch:
            for module in filter(is_plain, self._linears):
                switch.set(module, "forward", accumulating(module))
            for part in self.replacements:
                switch.set(part.owner, part.attribute, part.value)
            for module, kind, number in self._staged:
                switch.set(module, "forward", _staged(module.forward, kind, number))
            for number, (decoder, replay) in enumerate(self._decoders.items()):
                forward = decoder.forward
                if self._checkpoints:
                    forward = checkpointed(forward, replay)
                if ending is not None and number == len(self.numbers) - 1:
                    forward = ending.watched(forward)
                again = replay.run_again if self._checkpoints else None
                switch.set(decoder, "forward", _staged(forward, "layer", number, again))
                switch.undo(replay.clear)
            yield


def _mlp(decoder: nn.Module, attention: nn.Module) -> nn.Module | None:
    """A decoder layer's feed-forward part: its largest child that holds no attention."""
    others = [
        child
        for child in decoder.children()
        if all(module is not attention for module in child.modules())
    ]
    return max(others, key=lambda c: sum(p.numel() for p in c.parameters()), default=None)


def _staged(
    forward: Callable[..., Any],
    kind: str,
    number: int,
    first: Callable[[], object] | None = None,
) -> Callable[..., Any]:
    """A forward that shows itself, and its backward, which begins with `first`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with stage(kind, number):
            result = forward(*args, **kwargs)
        show_backward(kind, number, (*args, *kwargs.values()), result, first)
        return result

    return run
