"""Page gradients in bf16 whose sum is right on average: stochastic rounding.

A sum that is rounded to the nearest bf16 after every chunk never sees terms below half of its last
bit. Rounded up with the probability that the part behind the last bit says, it is unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

DROPPED = 16
"""Bits of an fp32 number that a bf16 number has not."""


class StochasticRounding:
    """Rounds to bf16 with random numbers of its own.

    Args:
        device: of the numbers.
        seed: integers that say which random numbers: the same seed gives the same bits, in the same
            order of calls.
    """

    def __init__(self, device: torch.device, seed: Sequence[int]) -> None:
        low, high = np.random.SeedSequence(seed).generate_state(2, np.uint32).tolist()
        self._seed = (high << 32 | low) >> 2  # leaves room to count up from
        self._generator = torch.Generator(device).manual_seed(self._seed)

    def store(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Round x into `out`; what is not finite stays so.

        Args:
            x: fp32 or fp64 [K|V, tokens, heads, dim], K and V each without gaps.
            out: bf16, the same.
        """
        x = x.float()
        if x.device.type != "cuda":
            out.copy_(rounded(x, self._generator))
            return
        from oomb.cache.stochastic_kernel import fused_store  # Triton comes with torch's CUDA

        self._seed += 1
        fused_store(x, out, self._seed)


def rounded(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """x, fp32, to numbers that bf16 has, with random numbers of a generator."""
    bits = x.view(torch.int32)
    chance = torch.empty_like(bits).random_(0, 1 << DROPPED, generator=generator)
    # A float's bits without its sign are in order of its size: a carry is the next bf16.
    up = (bits + chance) & (-1 << DROPPED)
    return torch.where(x.isfinite(), up.view(torch.float32), x)
