"""The ordinary way, to compare with: the model run whole, its gradients, bytes and memory need."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oomb.profiling import LiveBytes

# Share of the free memory that the whole run may be expected to take.
USABLE = 0.8
PROBE_LENGTHS = (128, 256, 512)


def whole_run(model: Any, input_ids: torch.Tensor) -> float:
    """One ordinary step on input_ids [B, N]: adds to `.grad`, returns the loss."""
    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def zero_gradients(model: Any) -> None:
    """Give every trainable parameter a `.grad` of zeros, so that later bytes are activations."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all gradients, by parameter name."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def relative_differences(
    ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> dict[str, float]:
    """||ours - reference|| / ||reference|| of each parameter, computed in fp64.

    A gradient that only one side has, that differs from one of zeros, or that is not a number
    counts as infinitely different.
    """
    result = {}
    for name in reference.keys() | ours.keys():
        if name not in ours or name not in reference:
            result[name] = float("inf")
            continue
        a, b = ours[name].double(), reference[name].double()
        error, scale = float(torch.linalg.vector_norm(a - b)), float(torch.linalg.vector_norm(b))
        if error == 0:
            result[name] = 0.0
        else:
            ratio = error / scale if scale else float("inf")
            result[name] = ratio if ratio == ratio else float("inf")  # NaN would compare as small
    return result


def whole_run_need(model: Any, tokens: torch.Tensor) -> Callable[[int], int]:
    """How many activation bytes `whole_run` takes at a length, from runs at short lengths.

    Bytes are a polynomial of degree 2 at most in the length (degree 1 where attention never
    holds its scores), so three short runs on tokens [N], N >= 2, determine it.
    """
    points = [n for n in PROBE_LENGTHS if n < len(tokens)] or [len(tokens)]
    peaks = []
    for n in points:
        zero_gradients(model)
        with LiveBytes() as live:
            whole_run(model, tokens[None, :n])
        peaks.append(live.peak)
    zero_gradients(model)
    coefficients = np.polyfit(points, peaks, len(points) - 1)
    return lambda length: max(0, int(np.polyval(coefficients, length)))


def longest_that_fits(need: Callable[[int], int], context: int, free: int) -> int:
    """The first of context, context / 2, context / 4, ... that needs at most `free` * USABLE."""
    length = context
    while length > 2 and need(length) > free * USABLE:
        length //= 2
    return length


def memory_free(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    else:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    # A container may hold less than the machine; its file cache gives way when memory is asked for.
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (group / "memory.max").read_text().strip() != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        limits.append(int((group / "memory.max").read_text()) - used)
    return max(0, min(limits))
