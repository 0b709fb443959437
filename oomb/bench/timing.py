"""Time on the device's own clock, and what a run's peak memory was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Mark = torch.cuda.Event | float
Result = TypeVar("Result")


def mark(device: torch.device) -> Mark:
    """This moment: on a GPU, when everything launched so far has run."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(begin: Mark, end: Mark) -> float:
    """Seconds between two marks of one device; on a GPU, both must have been reached."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    return end - begin


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What `run` returns, and the seconds until the device had done all of it."""
    synchronize(device)
    start = time.perf_counter()
    result = run()
    synchronize(device)
    return result, time.perf_counter() - start


def reset_peak(device: torch.device) -> None:
    """From here on, `peak_gib` tells the most that was allocated."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    """Most GiB allocated on the GPU at a time; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
