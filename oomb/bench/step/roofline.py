"""How fast a step could be: its operations at the rates that a GPU sustains."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oomb.bench.step.flops import StepFlops
from oomb.bench.timing import timed

GEMM_SIDE = {"cuda": 8192, "cpu": 1024}
GEMM_SECONDS = 1.0


@dataclass(frozen=True)
class Rates:
    """TFLOP/s in bf16.

    Attributes:
        linear: sustained by large GEMMs.
        attention_forward: sustained by the best kernel.
        attention_backward: sustained by the best kernel, at 2.5 times the forward's operations.
        peak: of the data sheet, dense.
        source: where the rates come from.
    """

    linear: float
    attention_forward: float
    attention_backward: float
    peak: float
    source: str


KNOWN = {
    "NVIDIA H200": Rates(671, 601, 482, 989.5, "measured on an H200; peak of its data sheet"),
}


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Rates of a GPU: known by name, or those of a GEMM measured now, for everything."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if name in KNOWN:
            return KNOWN[name]
    rate = _gemm_rate(device, dtype)
    return Rates(rate, rate, rate, rate, "a GEMM measured here, for all four")


def least_seconds(flops: StepFlops, rates: Rates) -> float:
    """Seconds of a step in which every kernel ran at its rate and nothing else took time."""
    return 1e-12 * (
        (flops.linear + flops.loss) / rates.linear
        + flops.attention_forward / rates.attention_forward
        + flops.attention_backward / rates.attention_backward
    )


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = GEMM_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timed(lambda: left @ right, device)
    products, total = 0, 0.0
    while total < GEMM_SECONDS:
        _, seconds = timed(lambda: [left @ right for _ in range(8)], device)
        products, total = products + 8, total + seconds
    return 2 * side**3 * products / total / 1e12
