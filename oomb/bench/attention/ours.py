"""A backend of OOMB, called as the engine calls it: pages, segments and page gradients included."""

from __future__ import annotations

import torch

from oomb.attention import Backend, LayerCall, attend, attend_backward
from oomb.bench.attention.options import AttentionSettings
from oomb.bench.attention.problem import Outcome, Problem
from oomb.cache import History
from oomb.cache.pool import LayerShape
from oomb.chunking import Chunk, Own, Read

Tensors = tuple[torch.Tensor, ...]


class Ours:
    """Attention of a chunk that reads its keys from pages, or of a causal square alone.

    Args:
        name: as in the table.
        problem: inputs.
        backend: the backend.
        settings: pages, segments and the page gradients' dtype.
    """

    def __init__(
        self, name: str, problem: Problem, backend: Backend, settings: AttentionSettings
    ) -> None:
        self.name, self.note = name, ""
        self._problem = problem
        self._history = _write_history(problem, settings)
        self._call = LayerCall(
            layer=0,
            scale=problem.scale,
            window=None,
            chunk=_chunk(problem),
            history=self._history,
            backend=backend,
        )
        # A chunk always brings K and V of its own; queries over history alone do not look at them.
        own = problem.shape.causal
        self._k, self._v = (
            (problem.k, problem.v) if own else (_own_keys(problem), _own_keys(problem))
        )
        self._grad_out = problem.grad_out.transpose(1, 2)
        self._history.open_gradients()

    def forward(self) -> Tensors:
        """Out [1, N, H, D] and log-sum-exp."""
        return attend(self._call, self._problem.q, self._k, self._v)

    def backward(self, state: Tensors) -> Tensors:
        """Gradients of q, k and v; those of the pages grow in place."""
        q = self._problem.q
        return attend_backward(self._call, self._grad_out, q, self._k, self._v, *state)

    def outcome(self) -> Outcome:
        """See `Implementation`; the page gradients start from zero."""
        self._history.open_gradients()
        state = self.forward()
        dq, dk, dv = self.backward(state)
        if not self._problem.shape.causal:
            pages = list(self._history.segments(0, 0, 0, self._problem.shape.keys, gradients=True))
            dk = torch.cat([page.grad_k for page in pages], dim=2)
            dv = torch.cat([page.grad_v for page in pages], dim=2)
        return Outcome(state[0].transpose(1, 2), dq, dk, dv)


def _chunk(problem: Problem) -> Chunk:
    shape = problem.shape
    if shape.causal:
        own = (Own((0, 1), 0, shape.queries),)
        return Chunk(index=0, start=0, stop=shape.queries, own=own, reads=(), writes=())
    read = Read(row=0, start=0, stop=shape.queries, first=0, last=shape.keys)
    start = shape.keys
    stop = start + shape.queries
    return Chunk(index=1, start=start, stop=stop, own=(), reads=(read,), writes=())


def _write_history(problem: Problem, settings: AttentionSettings) -> History:
    shape = problem.shape
    tokens = 0 if shape.causal else shape.keys
    history = History(
        [LayerShape(heads=shape.kv_heads, dim=shape.head_dim, dtype=problem.k.dtype)],
        pages_per_row=[-(-tokens // settings.page)],
        page_size=settings.page,
        segment_pages=settings.segment_pages(tokens),
        page_grad_dtype=settings.page_grad_dtype,
        device=problem.device,
    )
    if tokens:
        history.table.hold(0, 0, tokens)
        history.write(0, 0, 0, problem.k[0], problem.v[0])
    return history


def _own_keys(problem: Problem) -> torch.Tensor:
    shape = problem.shape
    size = (1, shape.queries, shape.kv_heads, shape.head_dim)
    return problem.k.new_zeros(size).transpose(1, 2)
