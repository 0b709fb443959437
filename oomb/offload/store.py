"""What an engine keeps from step to step for offloading: the tier, and its host memory."""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import torch

from oomb.config import OffloadConfig
from oomb.offload.ring import NAN_BYTE
from oomb.offload.simulated import SimulatedTier
from oomb.offload.tier import HostMemory, Tier

GIB = 2**30


class OffloadStore:
    """Host memory by content, made when first needed and grown when more is.

    Args:
        config: budgets.
        device: of the model.

    Attributes:
        gpu_budget: bytes of GPU memory for the pages of the next step.
    """

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        self.config = config
        self.gpu_budget = 0 if config.gpu_budget == "auto" else config.gpu_budget
        self.tier = make_tier(device, pinned=config.pinned)
        self._memory: dict[str, HostMemory] = {}
        # What an engine that is never closed has taken is given back with it.
        self._finalizer = weakref.finalize(self, _free, self.tier, self._memory)

    def reserve(
        self, wanted: dict[str, list[int]], *, idle: bool = False
    ) -> dict[str, list[torch.Tensor]]:
        """Host memory for a step.

        Args:
            wanted: by content, bytes of each piece.
            idle: nothing that is held is in use, so that it may be given back to stay within the
                budget.

        Returns:
            The same as uint8 tensors, each at least as long; what is in them is anything.

        Raises:
            ValueError: it is more than `host_budget`, or than the host has to spare.
            MemoryError: the host does not give it.
        """
        if idle and self._too_much(wanted):
            self._give_back()
        small = [what for what, sizes in wanted.items() if not self._holds(what, sizes)]
        self._refuse_too_much(wanted, small)
        for what in small:
            if what in self._memory:  # its place is needed for the larger one
                self.tier.drain()
                self._memory.pop(what).free()
            self._memory[what] = self.tier.host_memory(wanted[what], what)
        if self.config.poison:
            for piece in (piece for each in self._memory.values() for piece in each.pieces):
                piece.fill_(NAN_BYTE)
        return {what: self._memory[what].pieces for what in wanted}

    @property
    def nbytes(self) -> int:
        """Host memory held now."""
        return sum(_nbytes(memory) for memory in self._memory.values())

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""
        self._finalizer()

    def _too_much(self, wanted: dict[str, list[int]]) -> bool:
        try:
            small = [what for what, sizes in wanted.items() if not self._holds(what, sizes)]
            self._refuse_too_much(wanted, small)
        except ValueError:
            return True
        return False

    def _give_back(self) -> None:
        self.tier.drain()
        while self._memory:
            self._memory.popitem()[1].free()

    def _holds(self, what: str, sizes: list[int]) -> bool:
        if what not in self._memory:
            return False
        pieces = self._memory[what].pieces
        return len(pieces) == len(sizes) and all(
            piece.numel() >= size for piece, size in zip(pieces, sizes, strict=True)
        )

    def _refuse_too_much(self, wanted: dict[str, list[int]], small: list[str]) -> None:
        needed = sum(sum(sizes) for sizes in wanted.values())
        kept = sum(_nbytes(each) for what, each in self._memory.items() if what not in small)
        more = sum(sum(wanted[what]) for what in small)
        budget = self.config.host_budget
        if budget is not None:
            if kept + more > budget:
                raise ValueError(
                    f"this step needs {needed} bytes ({_gib(needed)}) of host memory, more than "
                    f"host_budget={budget} bytes ({_gib(budget)}); raise host_budget or "
                    "gpu_budget, or train on a shorter context"
                )
            return
        freed = sum(_nbytes(self._memory[what]) for what in small if what in self._memory)
        spare = _spare_bytes()
        if spare is not None and more > spare + freed:
            raise ValueError(
                f"this step needs {_gib(more)} more of host memory for pages, and the host has "
                f"{_gib(spare + freed)} to spare; raise gpu_budget, train on a shorter context, or "
                "give host_budget if the host can do more than it says"
            )


def make_tier(device: torch.device, *, pinned: bool) -> Tier:
    """The tier for a model on `device`: CUDA streams, or threads that stand for them on a CPU."""
    if device.type == "cuda":
        from oomb.offload.cuda import CudaTier

        return CudaTier(device, pinned=pinned)
    return SimulatedTier()


def _nbytes(memory: HostMemory) -> int:
    return sum(piece.numel() for piece in memory.pieces)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def _spare_bytes() -> int | None:
    """What Linux says can be taken without swapping; None where it says nothing."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def _free(tier: Tier, memory: dict[str, HostMemory]) -> None:
    tier.close()
    while memory:
        memory.popitem()[1].free()
