"""Implementations side by side: each is checked, then all are timed in turns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from oomb.attention import choose_backend
from oomb.bench.attention.options import ATOMIC, AttentionSettings, Shape
from oomb.bench.attention.ours import Ours
from oomb.bench.attention.peers import (
    CUDNN,
    FA2,
    PEERS,
    CannotRunError,
    make_peer,
)
from oomb.bench.attention.problem import Implementation, Problem, make_problem
from oomb.bench.attention.truth import compared_heads, relative_errors
from oomb.bench.inputs import one_sentence
from oomb.bench.timing import elapsed, mark, synchronize

log = logging.getLogger("oomb")
ROUND_SECONDS = 0.2
"""How long one implementation runs before the next has its turn."""
MOST_REPEATS = 50
PASSES = ("forward", "backward")
RATIOS = {"times_cudnn": CUDNN, "times_fa2": FA2}


def measure_shape(shape: Shape, settings: AttentionSettings) -> dict[str, Any]:
    """One shape: every implementation's time, rate and error.

    Args:
        shape: the shape.
        settings: what to run.

    Returns:
        A JSON-ready row; `implementations` in the order they were asked for, and `left_out`, each
        with a reason and, where one of OOMB's own raised, `failed`.
    """
    problem = make_problem(shape, settings.device, settings.dtype)
    ready, left_out = _prepare(problem, settings)
    errors: dict[str, dict[str, float]] = {}
    if settings.error:
        outcomes = {each.name: each.outcome() for each in ready}
        errors = relative_errors(problem, outcomes)
        del outcomes
    times = time_in_turns(ready, settings.rounds, problem.device)
    rows = [_figures(each, times[each.name], shape) for each in ready]
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        for field, other in RATIOS.items():
            row[field] = _ratio(row, by_name.get(other))
        row["error"] = errors.get(row["name"])
    heads = compared_heads(shape, settings.device) if settings.error else []
    return {
        "queries": shape.queries,
        "keys": shape.keys,
        "causal": shape.causal,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "segment_tokens": None
        if shape.causal
        else settings.segment_pages(shape.keys) * settings.page,
        "kv_heads_compared": heads,
        "implementations": rows,
        "left_out": left_out,
    }


def time_in_turns(
    ready: Sequence[Implementation], rounds: int, device: torch.device
) -> dict[str, list[list[tuple[float, float]]]]:
    """Per implementation and round, seconds of forward and of backward for each repeat.

    Taking turns puts a GPU's changing clocks on all alike.
    """
    repeats = {each.name: _repeats(each, device) for each in ready}
    times: dict[str, list[list[tuple[float, float]]]] = {each.name: [] for each in ready}
    for _ in range(rounds):
        for each in ready:
            times[each.name].append(_repeat(each, repeats[each.name], device))
    return times


def _prepare(
    problem: Problem, settings: AttentionSettings
) -> tuple[list[Implementation], list[dict[str, Any]]]:
    """Implementations that ran once, and the others with the reason."""
    ready: list[Implementation] = []
    left_out: list[dict[str, Any]] = []
    for name in settings.backends:
        row: dict[str, Any] = {"name": f"oomb {name}"}
        try:
            ready.append(_our_backend(name, problem, settings))
            continue
        except CannotRunError as error:
            row["reason"] = str(error)
        except torch.OutOfMemoryError:
            row["reason"] = "out of memory."
        except Exception as error:  # the others are still worth measuring
            log.debug("attention backend %r failed", name, exc_info=True)
            row |= {"reason": f"{type(error).__name__}: {one_sentence(error)}", "failed": True}
        left_out.append(row)
    for name in PEERS if settings.peers else ():
        try:
            ready.append(make_peer(name, problem))
        except CannotRunError as error:
            left_out.append({"name": name, "reason": str(error)})
    return ready, left_out


def _our_backend(name: str, problem: Problem, settings: AttentionSettings) -> Ours:
    try:
        backend = choose_backend(
            name.removesuffix("-atomic"),
            device=settings.device,
            dtype=settings.dtype,
            head_dims={problem.shape.head_dim},
            accumulate="atomic" if name == ATOMIC else "owner",
        )
    except ValueError as error:
        reason = str(error).split("cannot run here: ")[-1].split("; use ")[0]
        raise CannotRunError(reason + ".") from None
    ours = Ours(f"oomb {name}", problem, backend, settings)
    ours.outcome()
    return ours


def _repeats(each: Implementation, device: torch.device) -> int:
    """How often it runs in `ROUND_SECONDS`, at least once; warms up too."""
    _repeat(each, 1, device)
    ((forward, backward),) = _repeat(each, 1, device)
    return max(1, min(MOST_REPEATS, int(ROUND_SECONDS / (forward + backward))))


def _repeat(each: Implementation, repeats: int, device: torch.device) -> list[tuple[float, float]]:
    """All is launched before the first wait, so that the GPU never waits for Python."""
    marks = []
    for _ in range(repeats):
        begin = mark(device)
        state = each.forward()
        middle = mark(device)
        each.backward(state)
        marks.append((begin, middle, mark(device)))
        del state
    synchronize(device)
    return [(elapsed(a, b), elapsed(b, c)) for a, b, c in marks]


def _figures(
    each: Implementation, rounds: list[list[tuple[float, float]]], shape: Shape
) -> dict[str, Any]:
    """Medians over all repeats, and of every round alone, which tells how steady they were."""
    row: dict[str, Any] = {"name": each.name, "note": each.note}
    for number, name in enumerate(PASSES):
        seconds = median(repeat[number] for repeats in rounds for repeat in repeats)
        flops = shape.forward_flops if name == "forward" else shape.backward_flops
        row[f"{name}_ms"] = 1e3 * seconds
        row[f"{name}_tflops"] = flops / seconds / 1e12
        row[f"{name}_ms_of_rounds"] = [
            1e3 * median(repeat[number] for repeat in repeats) for repeats in rounds
        ]
    row["repeats"] = sum(map(len, rounds))
    return row


def _ratio(row: dict[str, Any], other: dict[str, Any] | None) -> dict[str, float] | None:
    """How many times as fast as the other; above 1 is faster."""
    if other is None:
        return None
    ratios = {name: other[f"{name}_ms"] / row[f"{name}_ms"] for name in PASSES}
    both, other_both = (sum(each[f"{name}_ms"] for name in PASSES) for each in (row, other))
    return {**ratios, "both": other_both / both}
