"""Time and peak memory of a step, without making the host wait for the GPU."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Named marks on the device's own clock; the host's where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)

    def mark(self, name: str) -> None:
        """What follows is called `name`, until the next mark."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def timings(self) -> dict[str, float]:
        """Seconds by name, and their `total`; waits for the last mark."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        seconds = {
            name: begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin
            for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False)
        }
        return {**seconds, "total": sum(seconds.values())}

    def peak_memory(self) -> int | None:
        """Most bytes allocated on the GPU since the start; None on a CPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._on_gpu else None
