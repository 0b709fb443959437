"""What moves pages between host and GPU: two queues of copies beside the computation.

Nothing here waits on the host. Every use of a buffer ends with a `Done`, and whoever uses it next
names those it comes after: copies wait for kernels, kernels for copies, copies for each other.
Copies, and what kernels wait for copies, are stages of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oomb.profiling.span import Span
from oomb.profiling.stage import Stage, stage


@dataclass(frozen=True)
class Done:
    """Something that will have happened.

    Attributes:
        event: of a CUDA stream, or of a thread.
        copy: the copy that happens; None for kernels.
    """

    event: Any
    copy: Span | None = None


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(to, from) of each copy; both contiguous and of one shape and dtype."""


class Tier(Protocol):
    """Host memory, and copies from and to it.

    Attributes:
        name: `cuda`, or `simulated`.
    """

    name: str

    def wait(self, after: Sequence[Done]) -> None:
        """Kernels launched from now on come after all of these."""

    def begin(self, buffer: torch.Tensor, after: Sequence[Done]) -> None:
        """Kernels launched from now on may use a GPU buffer, once all of `after` has happened."""

    def end(self, buffer: torch.Tensor) -> Done:
        """Kernels launched from now on do not use the buffer until the next `begin`."""

    def copy_in(self, pairs: Pairs, after: Sequence[Done], layer: int) -> Done:
        """Copy a layer's numbers from host to GPU in the background, in order of calls."""

    def copy_out(self, pairs: Pairs, after: Sequence[Done], layer: int) -> Done:
        """Copy them from GPU to host in the background, in order of calls, beside `copy_in`."""

    def settle(self) -> None:
        """Kernels launched from now on come after all copies."""

    def host_memory(self, sizes: Sequence[int], what: str) -> HostMemory:
        """Host memory in pieces of `sizes` bytes, for the content called `what`."""

    def drain(self) -> None:
        """Wait, on the host, until all copies have happened."""

    def close(self) -> None:
        """`drain`, and end what runs."""


class HostMemory(Protocol):
    """Pieces of host memory.

    Attributes:
        pieces: uint8 [bytes] each.
        nbytes: taken from the host; more than the pieces where each has pages of its own.
    """

    pieces: list[torch.Tensor]
    nbytes: int

    def free(self) -> None:
        """Give it back; no copy may be under way."""


def copying(kind: str, pairs: Pairs, layer: int) -> Stage:
    """The stage of a copy: `kind` is `copy_in` or `copy_out`."""
    return stage(kind, layer, nbytes=sum(to.nbytes for to, _ in pairs))


def waiting(after: Sequence[Done], layer: int) -> AbstractContextManager:
    """The stage in which a layer's kernels begin to wait; none where they wait for no copy."""
    copies = [done.copy for done in after if done.copy is not None]
    return stage("wait", layer, waits_on=copies) if copies else nullcontext()
