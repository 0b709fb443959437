"""The kernels that people use otherwise, on the same inputs, through autograd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from oomb.bench.attention.problem import Implementation, Outcome, Problem
from oomb.bench.inputs import one_sentence

FA2, CUDNN, FLEX = "SDPA FA2", "SDPA cuDNN", "FlexAttention"
KERNELS = {FA2: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
"""SDPA's kernels by their name in the table."""
PEERS = (*KERNELS, FLEX)
WHY_NOT = {FA2: "flash attention kernel not used", CUDNN: "cudnn attention kernel not used"}
"""What torch warns, in small letters, before it says why a kernel was not used."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class CannotRunError(Exception):
    """A peer cannot run here; the message is one sentence."""


class Peer:
    """A differentiable attention of leaves q, k and v.

    Args:
        name: as in the table.
        problem: inputs.
        attention: the function.
        expanded: every query head gets K and V of its own, copied beforehand, for a kernel whose
            heads cannot share them.
    """

    def __init__(
        self, name: str, problem: Problem, attention: Attention, *, expanded: bool = False
    ) -> None:
        shape = problem.shape
        copies = shape.heads // shape.kv_heads if expanded else 1
        self.name = name
        self.note = ""
        if copies > 1:
            self.note = f"K and V copied to {shape.heads} heads, and gradients summed, untimed"
        if name == FA2 and problem.device.type != "cuda":
            self.note = "PyTorch's flash attention for CPUs"
        k, v = (
            x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (problem.k, problem.v)
        )
        self._leaves = [x.detach().requires_grad_() for x in (problem.q, k, v)]
        self._grad_out, self._attention, self._copies = problem.grad_out, attention, copies

    def forward(self) -> torch.Tensor:
        """Out [1, H, N, D] with its graph."""
        return self._attention(*self._leaves)

    def backward(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of q, k and v."""
        return torch.autograd.grad(state, self._leaves, self._grad_out)

    def outcome(self) -> Outcome:
        """See `Implementation`; gradients of copied heads are summed in fp32 (fp64 for fp64)."""
        out = self.forward()
        dq, dk, dv = self.backward(out)
        if self._copies > 1:
            wide = torch.promote_types(dk.dtype, torch.float32)
            dk, dv = (x.unflatten(1, (-1, self._copies)).sum(2, dtype=wide) for x in (dk, dv))
        return Outcome(out.detach(), dq, dk, dv)


def make_peer(name: str, problem: Problem) -> Implementation:
    """A peer that has run once.

    Args:
        name: one of `PEERS`.
        problem: inputs.

    Returns:
        The peer.

    Raises:
        CannotRunError: it cannot run here; the message says why.
    """
    try:
        return _flex(problem) if name == FLEX else _sdpa(name, problem)
    except torch.OutOfMemoryError:
        raise CannotRunError("out of memory.") from None


def _sdpa(name: str, problem: Problem) -> Peer:
    if name == CUDNN and problem.device.type != "cuda":
        raise CannotRunError("it needs a CUDA GPU.")
    shape = problem.shape
    first = None
    for expanded in (False, True) if shape.heads > shape.kv_heads else (False,):
        peer = Peer(name, problem, _sdpa_call(KERNELS[name], problem), expanded=expanded)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                peer.outcome()
                return peer
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                first = first or _reason(name, error, [str(w.message) for w in told])
    raise CannotRunError(first)


def _sdpa_call(kernel: SDPBackend, problem: Problem) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(
                q, k, v,
                is_causal=problem.shape.causal,
                scale=problem.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip

    return attention


def _reason(name: str, error: RuntimeError, told: list[str]) -> str:
    """torch warns of every kernel in turn: a headline, then the reason."""
    for headline, reason in pairwise(told):
        if headline.lower().startswith(WHY_NOT[name]):
            return one_sentence(RuntimeError(reason.split(" (Triggered internally")[0]))
    return one_sentence(error)


def _flex(problem: Problem) -> Peer:
    if problem.device.type != "cuda":
        raise CannotRunError("its compiled backward needs a CUDA GPU.")
    # Imported here: it pulls in the compiler.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # else a second shape is compiled for sizes that vary
    shape = problem.shape
    keywords: dict[str, Any] = {"scale": problem.scale, "enable_gqa": True}
    try:
        if shape.causal:
            size = (None, None, shape.queries, shape.keys)
            keywords["block_mask"] = create_block_mask(_causal, *size, device=problem.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        peer = Peer(FLEX, problem, lambda q, k, v: compiled(q, k, v, **keywords))
        peer.outcome()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler raises anything
        raise CannotRunError(one_sentence(error)) from error
    return peer


def _causal(_row: Any, _head: Any, query: Any, key: Any) -> Any:
    return query >= key
