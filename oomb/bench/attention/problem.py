"""The inputs that all implementations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oomb.bench.attention.options import Shape


@dataclass(frozen=True)
class Problem:
    """Random q, k, v and gradient of the output, laid out token by token as a model has them.

    Attributes:
        shape: sizes.
        q: [1, H, N, D].
        k, v: [1, G, S, D].
        grad_out: [1, H, N, D].
        scale: factor on q . k.
    """

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    scale: float

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.q.device


@dataclass(frozen=True)
class Outcome:
    """What an implementation computed, in any dtype.

    Attributes:
        out, dq: [1, H, N, D].
        dk, dv: [1, G, S, D].
    """

    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class Implementation(Protocol):
    """One way of computing a problem.

    Attributes:
        name: as in the table.
        note: how it was run, where that needs saying; else empty.
    """

    name: str
    note: str

    def forward(self) -> Any:
        """Attention; returns what the backward needs."""

    def backward(self, state: Any) -> Any:
        """Every gradient, from what `forward` returned."""

    def outcome(self) -> Outcome:
        """Run both once, outside of any timing."""


def make_problem(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Normal random numbers, always the same."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        size = (1, tokens, heads, shape.head_dim)
        numbers = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return numbers.to(dtype).transpose(1, 2)

    return Problem(
        shape=shape,
        q=normal(shape.queries, shape.heads),
        k=normal(shape.keys, shape.kv_heads),
        v=normal(shape.keys, shape.kv_heads),
        grad_out=normal(shape.queries, shape.heads),
        scale=shape.head_dim**-0.5,
    )
