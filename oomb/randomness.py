"""Random states, so that the sweep draws the same dropout masks as the fill."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RandomState:
    """State of the generators that a model on `device` draws from."""

    device: torch.device
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Read the states now. On CUDA this reads the generator's host side: no synchronisation."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Set the generators back to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def __eq__(self, other: object) -> bool:
        """Whether no random numbers were drawn between two states."""
        if not isinstance(other, RandomState):
            return NotImplemented
        same_cuda = self.cuda is other.cuda or torch.equal(self.cuda, other.cuda)
        return torch.equal(self.cpu, other.cpu) and same_cuda

    __hash__ = None

    @property
    def nbytes(self) -> int:
        """Bytes this state takes."""
        return self.cpu.nbytes + (self.cuda.nbytes if self.cuda is not None else 0)
