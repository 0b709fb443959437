"""The load-balancing loss of mixture-of-experts models, over a whole sequence in chunks.

transformers' loss is num_experts * sum over experts of f_e * p_e, where f_e is the share of
choices that fell on expert e and p_e its mean routing probability, both over all layers and
tokens. Gradients flow through p alone. Once the fill has counted every choice, f is known, and each
chunk's term is linear in its own probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RouterSettings:
    """What the loss needs from a model: `coefficient` times the loss is added."""

    num_experts: int
    top_k: int
    coefficient: float


class RouterBalance:
    """Collects expert choices over chunks, then turns routing probabilities into loss."""

    def __init__(self, settings: RouterSettings, device: torch.device) -> None:
        self._settings = settings
        # fp32 like transformers: counts are exact up to 2^24, and the shares round alike
        self._choices = torch.zeros(settings.num_experts, dtype=torch.float32, device=device)
        # a plain number while nothing is masked, like transformers': x / number rounds differently
        self._tokens: float | torch.Tensor = 0.0

    def count(self, logits: tuple[torch.Tensor, ...], real: torch.Tensor | None) -> None:
        """Count a chunk's choices.

        Args:
            logits: per layer, router logits [B * n, experts].
            real: bool [B, n], False on padding; None where all tokens are real.
        """
        for layer in logits:
            chosen = layer.detach().softmax(-1).topk(self._settings.top_k, dim=-1).indices
            weights = self._weights(layer, real)
            self._choices.index_add_(
                0, chosen.flatten(), weights.repeat_interleave(self._settings.top_k)
            )
            self._tokens = self._tokens + (layer.shape[0] if real is None else weights.sum())

    def mass(self, logits: tuple[torch.Tensor, ...], real: torch.Tensor | None) -> torch.Tensor:
        """A chunk's routing probabilities, summed over layers and tokens: [experts], with graph."""
        return sum(
            (_probabilities(layer) * self._weights(layer, real)[:, None]).sum(0) for layer in logits
        )

    def loss(self, mass: torch.Tensor) -> torch.Tensor:
        """coefficient * loss of some chunks' mass, once every chunk is counted; 0-d, with graph.

        The loss is linear in the mass: chunks' losses add up to the whole sequence's.
        """
        share = self._choices / self._tokens
        scale = self._settings.coefficient * self._settings.num_experts
        return scale * (share * (mass / self._tokens)).sum()

    def _weights(self, layer: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        if real is None:
            return self._choices.new_ones(layer.shape[0])
        return real.flatten().to(torch.float32)


def _probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Softmax in the logits' dtype, then at least fp32, as transformers does."""
    return logits.softmax(-1).to(torch.promote_types(logits.dtype, torch.float32))
