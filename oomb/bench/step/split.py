"""Where a step's time goes on the GPU: linear layers, attention, loss, other kernels, idle.

A kernel belongs to what launched it: `attention` or `loss` if its launch lies inside such a range
of the launching thread, a stage of OOMB or an operator's own. Elsewhere its name decides.
Without Liger the head's GEMMs of transformers lie in no range, and count as linear.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CLASSES = ("linear", "attention", "loss", "other")
RANGES = {
    "attention": re.compile(r"^oomb::attention$|scaled_dot_product|ScaledDotProduct"),
    "loss": re.compile(
        r"^oomb::loss$|cross_entropy|CrossEntropy|nll_loss|NllLoss|log_softmax|LogSoftmax"
    ),
}
# Attention first: its kernels may be made of cutlass too.
KERNELS = {
    "attention": re.compile(r"sdpa|flash|fmha|attend|key_grads|query_grads", re.IGNORECASE),
    "loss": re.compile(r"cross_entropy", re.IGNORECASE),
    "linear": re.compile(r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE),
}
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
SPANS = ("cpu_op", "user_annotation")
TOP = 20
SHORT_NAME = 100

Interval = tuple[float, float]


def time_split(run: Callable[[], Any]) -> dict[str, Any]:
    """Run once under torch's profiler.

    Args:
        run: a step on a GPU.

    Returns:
        As `split_of_trace`.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return split_of_trace(json.loads(path.read_text(errors="replace"))["traceEvents"])


def split_of_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sum a trace's GPU time.

    Args:
        events: `traceEvents` of a Chrome trace, in microseconds.

    Returns:
        `seconds` by class and `idle`; `span`, from the first kernel's start to the last one's end;
        `kernels`, how many ran; `top`, the kernels that took longest, as
        (class, name, seconds, count).
    """
    events = [event for event in events if event.get("ph") == "X"]
    ranges = _Ranges(events)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    seconds = dict.fromkeys(CLASSES, 0.0)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    busy = []
    for event in events:
        if event.get("cat") not in ON_GPU:
            continue
        launch = launches.get(event.get("args", {}).get("correlation"))
        kind = (ranges.of(launch) if launch else None) or class_of_kernel(event["name"])
        seconds[kind] += event["dur"] / 1e6
        by_name[kind, event["name"]].append(event["dur"] / 1e6)
        busy.append((event["ts"], event["ts"] + event["dur"]))
    merged = _merge(busy)
    span = (merged[-1][1] - merged[0][0]) / 1e6 if merged else 0.0
    seconds["idle"] = span - sum(end - start for start, end in merged) / 1e6
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "seconds": seconds,
        "span": span,
        "kernels": len(busy),
        "top": [
            (kind, name[:SHORT_NAME], sum(times), len(times)) for (kind, name), times in longest
        ],
    }


def class_of_kernel(name: str) -> str:
    """The class that a kernel's name alone tells."""
    for kind, pattern in KERNELS.items():
        if pattern.search(name):
            return kind
    return "other"


class _Ranges:
    """Attention and loss ranges of every host thread."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        found: dict[tuple[Any, str], list[Interval]] = defaultdict(list)
        for event in events:
            if event.get("cat") in SPANS:
                for kind, pattern in RANGES.items():
                    if pattern.search(event["name"]):
                        span = (event["ts"], event["ts"] + event["dur"])
                        found[event["tid"], kind].append(span)
        self._merged = {key: _merge(intervals) for key, intervals in found.items()}

    def of(self, launch: dict[str, Any]) -> str | None:
        """The class of the range that a launch lies in."""
        for kind in RANGES:
            intervals = self._merged.get((launch["tid"], kind), [])
            before = bisect_right(intervals, (launch["ts"], float("inf"))) - 1
            if before >= 0 and launch["ts"] <= intervals[before][1]:
                return kind
        return None


def _merge(intervals: list[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
