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
        # whole numbers: from 2^24 on, adding 1 to an fp32 count does nothing
        self._choices = torch.zeros(settings.num_experts, dtype=torch.int64, device=device)
        # a plain number while nothing is masked, like transformers': x / number rounds differently
        self._tokens: int | torch.Tensor = 0

    def count(self, logits: tuple[torch.Tensor, ...], real: torch.Tensor | None) -> None:
        """Count a chunk's choices.

        Args:
            logits: per layer, router logits [B * n, experts].
            real: bool [B, n], False on padding; None where all tokens are real.
        """
        for layer in logits:
            chosen = layer.detach().softmax(-1).topk(self._settings.top_k, dim=-1).indices
            weights = self._weights(layer, real)
            repeated = weights.repeat_interleave(self._settings.top_k)
            self._choices.index_add_(0, chosen.flatten(), repeated)
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
        tokens = self._tokens
        tokens = tokens.to(torch.float32) if isinstance(tokens, torch.Tensor) else float(tokens)
        share = self._choices.to(torch.float32) / tokens  # fp32, rounded as transformers rounds it
        scale = self._settings.coefficient * self._settings.num_experts
        return scale * (share * (mass / tokens)).sum()

    def _weights(self, layer: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """1 for each real token, 0 for padding: int64 [B * n]."""
        if real is None:
            return torch.ones(layer.shape[0], dtype=torch.int64, device=layer.device)
        return real.flatten().long()


def _probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Softmax in the logits' dtype, then at least fp32, as transformers does."""
    return logits.softmax(-1).to(torch.promote_types(logits.dtype, torch.float32))
