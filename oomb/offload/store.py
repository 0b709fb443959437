"""What an engine keeps from step to step for offloading: the tier, and its host memory."""

from __future__ import annotations

import weakref

import torch

from oomb.config import OffloadConfig
from oomb.meminfo import meminfo
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

    def reserve(self, wanted: dict[str, list[int]]) -> None:
        """Make sure of a step's host memory; nothing of what is held may be in use.

        Args:
            wanted: by content, bytes of each piece.

        Raises:
            ValueError: it is more than `host_budget`, or than the host has to spare.
            MemoryError: the host does not give it.
        """
        if self._refusal(wanted) is not None:  # what other steps needed may be in the way
            self.tier.drain()
            _free_all(self._memory)
        refusal = self._refusal(wanted)
        if refusal is not None:
            raise ValueError(refusal)
        for what in self._too_small(wanted):
            if what in self._memory:  # its place is needed for the larger one
                self.tier.drain()
                self._memory.pop(what).free()
            self._memory[what] = self.tier.host_memory(wanted[what], what)
        if self.config.poison:
            for piece in (piece for each in self._memory.values() for piece in each.pieces):
                piece.fill_(NAN_BYTE)

    def pieces(self, what: str) -> list[torch.Tensor]:
        """Reserved memory of one content: uint8, at least as long as asked; anything is in it."""
        return self._memory[what].pieces

    @property
    def nbytes(self) -> int:
        """Host memory held now."""
        return sum(memory.nbytes for memory in self._memory.values())

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""
        self._finalizer()

    def _too_small(self, wanted: dict[str, list[int]]) -> list[str]:
        return [what for what, sizes in wanted.items() if not self._holds(what, sizes)]

    def _holds(self, what: str, sizes: list[int]) -> bool:
        if what not in self._memory:
            return False
        pieces = self._memory[what].pieces
        return len(pieces) == len(sizes) and all(
            piece.numel() >= size for piece, size in zip(pieces, sizes, strict=True)
        )

    def _refusal(self, wanted: dict[str, list[int]]) -> str | None:
        """Why what is wanted beside what is kept is too much, or None."""
        small = self._too_small(wanted)
        needed = sum(sum(sizes) for sizes in wanted.values())
        kept = sum(_nbytes(each) for what, each in self._memory.items() if what not in small)
        more = sum(sum(wanted[what]) for what in small)
        budget = self.config.host_budget
        if budget is not None:
            if kept + more <= budget:
                return None
            return (
                f"this step needs {needed} bytes ({_gib(needed)}) of host memory, more than "
                f"host_budget={budget} bytes ({_gib(budget)}); raise host_budget or "
                "gpu_budget, or train on a shorter context"
            )
        freed = sum(_nbytes(self._memory[what]) for what in small if what in self._memory)
        spare = _spare_bytes()
        if spare is None or more <= spare + freed:
            return None
        return (
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
    return meminfo("MemAvailable")


def _free(tier: Tier, memory: dict[str, HostMemory]) -> None:
    tier.close()
    _free_all(memory)


def _free_all(memory: dict[str, HostMemory]) -> None:
    while memory:
        memory.popitem()[1].free()
