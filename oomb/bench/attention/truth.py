"""Attention and its gradients in fp64, a block at a time, and how far from them a result is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch

from oomb.bench.attention.options import Shape
from oomb.bench.attention.problem import Outcome, Problem

QUERY_BLOCK = 1024
KEY_BLOCK = 4096
MAX_FLOPS = {"cuda": 1e14, "cpu": 2e11}
"""A few seconds of fp64; of larger problems, only some key/value heads are compared."""
FIELDS = tuple(field.name for field in fields(Outcome))


def relative_errors(problem: Problem, outcomes: dict[str, Outcome]) -> dict[str, dict[str, float]]:
    """||x - exact|| / ||exact|| over the compared heads.

    Args:
        problem: inputs, whose values are taken as exact.
        outcomes: results by implementation.

    Returns:
        Per implementation the errors of `out`, `dq`, `dk` and `dv`.
    """
    wrong = {name: dict.fromkeys(FIELDS, 0.0) for name in outcomes}
    norm = dict.fromkeys(FIELDS, 0.0)
    for head in compared_heads(problem.shape, problem.device):
        exact = exact_head(problem, head)
        for field, true in exact.items():
            norm[field] += float(true.square().sum())
            for name, outcome in outcomes.items():
                found = _of_head(outcome, field, head, problem.shape)
                wrong[name][field] += float((found.double() - true).square().sum())
    return {
        name: {field: (squares[field] / norm[field]) ** 0.5 for field in FIELDS}
        for name, squares in wrong.items()
    }


def compared_heads(shape: Shape, device: torch.device) -> list[int]:
    """Key/value heads, all or evenly spaced; each stands with every query head that shares it."""
    per_head = 3.5 * shape.forward_flops / shape.kv_heads  # seven products
    count = max(1, min(shape.kv_heads, int(MAX_FLOPS[device.type] / per_head)))
    return [number * shape.kv_heads // count for number in range(count)]


def exact_head(problem: Problem, head: int) -> dict[str, torch.Tensor]:
    """Truth for one key/value head.

    Args:
        problem: inputs.
        head: number of the key/value head.

    Returns:
        fp64 `out` and `dq` [query heads that share it, N, D]; `dk` and `dv` [S, D].
    """
    shape = problem.shape
    group = _query_heads(head, shape)
    k, v = problem.k[0, head].double(), problem.v[0, head].double()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    outs, dqs = [], []
    for first in range(0, shape.queries, QUERY_BLOCK):
        at = slice(first, first + QUERY_BLOCK)
        q, grad = problem.q[0, group, at].double(), problem.grad_out[0, group, at].double()
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"))
        for keys, scores in _scores(problem, q, k, first):
            total = torch.logaddexp(lse, scores.logsumexp(-1))
            out = out * torch.exp(lse - total)[..., None]
            out += torch.exp(scores - total[..., None]) @ v[keys]
            lse = total
        dq, delta = torch.zeros_like(q), (grad * out).sum(-1, keepdim=True)
        for keys, scores in _scores(problem, q, k, first):
            weights = torch.exp(scores - lse[..., None])
            dv[keys] += weights.flatten(0, 1).T @ grad.flatten(0, 1)
            grad_scores = weights * (grad @ v[keys].T - delta) * problem.scale
            dq += grad_scores @ k[keys]
            dk[keys] += grad_scores.flatten(0, 1).T @ q.flatten(0, 1)
        outs.append(out)
        dqs.append(dq)
    return {"out": torch.cat(outs, 1), "dq": torch.cat(dqs, 1), "dk": dk, "dv": dv}


def _scores(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, first: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of keys that the queries from `first` on see, and scores [heads, queries, keys]."""
    causal = problem.shape.causal
    queries = q.shape[1]
    last = min(len(k), first + queries) if causal else len(k)
    for start in range(0, last, KEY_BLOCK):
        keys = slice(start, min(start + KEY_BLOCK, last))
        scores = q @ k[keys].T * problem.scale
        if causal and keys.stop - 1 > first:
            i = torch.arange(first, first + queries, device=q.device)
            j = torch.arange(keys.start, keys.stop, device=q.device)
            scores.masked_fill_(j > i[:, None], float("-inf"))
        yield keys, scores


def _query_heads(head: int, shape: Shape) -> slice:
    size = shape.heads // shape.kv_heads
    return slice(head * size, (head + 1) * size)


def _of_head(outcome: Outcome, field: str, head: int, shape: Shape) -> torch.Tensor:
    heads = _query_heads(head, shape) if field in ("out", "dq") else head
    return getattr(outcome, field)[0, heads]
