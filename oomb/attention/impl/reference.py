"""The oracle: attention in plain PyTorch, on any device, in any dtype."""

from __future__ import annotations

import torch

from oomb.attention.api import Mask
from oomb.attention.segmentwise import Segmentwise


class ReferenceBackend(Segmentwise):
    """Computes in fp32, or fp64 for fp64 inputs."""

    name = "reference"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Mask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_, k_, v_ = (_wide(x) for x in (_group(q, k.shape[1]), k, v))
        scores = _scores(q_, k_, scale, mask)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - _finite(lse)[..., None])
        out = torch.einsum("bghns,bgsd->bghnd", weights, v_)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        mask: Mask,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = k.shape[1]
        q_, grad_, out_, k_, v_ = (
            _wide(x) for x in (*(_group(x, groups) for x in (q, grad_out, out)), k, v)
        )
        scores = _scores(q_, k_, scale, mask)
        weights = torch.exp(scores - _finite(_group(lse, groups))[..., None])
        grad_v = torch.einsum("bghns,bghnd->bgsd", weights, grad_)
        grad_weights = torch.einsum("bghnd,bgsd->bghns", grad_, v_)
        delta = (grad_ * out_).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta) * scale
        grad_q = torch.einsum("bghns,bgsd->bghnd", grad_scores, k_)
        grad_k = torch.einsum("bghns,bghnd->bgsd", grad_scores, q_)
        return grad_q.flatten(1, 2), grad_k, grad_v


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Query heads by the key/value head they share: [B, H, ...] -> [B, G, H/G, ...]."""
    return x.unflatten(1, (groups, -1))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp with 0 for queries that see nothing, whose scores are all -inf."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: Mask) -> torch.Tensor:
    scores = torch.einsum("bghnd,bgsd->bghns", q, k) * scale
    queries, keys = scores.shape[-2:]
    if not mask.hides_any(queries, keys):
        return scores
    back = torch.arange(queries, device=q.device)[:, None] + mask.offset
    back = back - torch.arange(keys, device=q.device)  # how far each key lies behind each query
    hidden = torch.zeros_like(back, dtype=torch.bool)
    if mask.causal:
        hidden |= back < 0
    if mask.window is not None:
        hidden |= back >= mask.window
    return scores.masked_fill(hidden, float("-inf"))
