"""The tier of an NVIDIA GPU: two copy streams, and host memory that is registered with CUDA.

Registered ("pinned") memory is what the copy engines read and write by themselves, at the full
speed of the bus and beside the kernels.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from oomb.offload.tier import Done, Pairs, copying
from oomb.profiling.stage import Stage

ALIGNMENT = mmap.PAGESIZE
REGISTERING_THREADS = 8
SHOWN_FROM = 2 << 30
"""Bytes from which registering (about half a second per GiB) shows its progress."""


class CudaTier:
    """Copies by two streams of their own.

    Args:
        device: the GPU.
        pinned: whether host memory is registered; ordinary memory makes copies wait for each other.
    """

    name = "cuda"

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self._device = device
        self._pinned = pinned
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def wait(self, after: Sequence[Done]) -> None:
        """See `Tier`."""
        stream = torch.cuda.current_stream(self._device)
        for done in after:
            stream.wait_event(done.event)

    def begin(self, buffer: torch.Tensor, after: Sequence[Done]) -> None:
        """See `Tier`."""
        self.wait(after)

    def end(self, buffer: torch.Tensor) -> Done:
        """See `Tier`."""
        return Done(torch.cuda.current_stream(self._device).record_event())

    def copy_in(self, pairs: Pairs, after: Sequence[Done], layer: int) -> Done:
        """See `Tier`."""
        return _copy(self._in, copying("copy_in", pairs, layer), pairs, after)

    def copy_out(self, pairs: Pairs, after: Sequence[Done], layer: int) -> Done:
        """See `Tier`."""
        return _copy(self._out, copying("copy_out", pairs, layer), pairs, after)

    def settle(self) -> None:
        """See `Tier`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._in)
        stream.wait_stream(self._out)

    def host_memory(self, sizes: Sequence[int], what: str) -> MappedMemory:
        """See `Tier`."""
        return MappedMemory(sizes, what, pinned=self._pinned)

    def drain(self) -> None:
        """See `Tier`."""
        self._in.synchronize()
        self._out.synchronize()

    def close(self) -> None:
        """See `Tier`."""
        self.drain()


def _copy(stream: torch.cuda.Stream, copying: Stage, pairs: Pairs, after: Sequence[Done]) -> Done:
    for done in after:
        stream.wait_event(done.event)
    with torch.cuda.stream(stream), copying as copy:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)
    return Done(stream.record_event(), copy)


class MappedMemory:
    """One mapping of exactly the bytes asked for, each piece on pages of its own.

    Pieces are registered one by one, since a copy may not cross from one registration to another.

    Args:
        sizes: bytes of each piece.
        what: what it is for, for messages.
        pinned: whether to register it with CUDA.

    Raises:
        MemoryError: the host has not that much memory, or does not let it be registered; nothing is
            kept.
    """

    def __init__(self, sizes: Sequence[int], what: str, *, pinned: bool) -> None:
        self._what = what
        self._registered: list[int] = []
        self.nbytes = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        self.pieces: list[torch.Tensor] = []
        if not self.nbytes:
            self._mapping = None
            self.pieces = [torch.empty(0, dtype=torch.uint8) for _ in sizes]
            return
        try:
            self._mapping = mmap.mmap(-1, self.nbytes)
        except (OSError, ValueError) as error:
            raise MemoryError(self._refusal("host memory", str(error))) from error
        whole, start = torch.frombuffer(self._mapping, dtype=torch.uint8), 0
        for size in sizes:
            self.pieces.append(whole[start : start + size])
            start += -(-size // ALIGNMENT) * ALIGNMENT
        if pinned:
            self._register()

    def _register(self) -> None:
        # Threads, since most of the time goes into the kernel's clearing of each page.
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        hidden = self.nbytes < SHOWN_FROM
        bar = Progress(*columns, TimeRemainingColumn(), transient=True, disable=hidden)
        pieces = [piece for piece in self.pieces if piece.numel()]
        with bar, ThreadPoolExecutor(min(REGISTERING_THREADS, os.cpu_count() or 1)) as threads:
            task = bar.add_task(f"pinning host memory for {self._what}", total=self.nbytes)
            failures = []
            for piece, code in zip(pieces, threads.map(_register, pieces), strict=True):
                if code:
                    failures.append(code)
                else:
                    self._registered.append(piece.data_ptr())
                bar.advance(task, piece.numel())
        if failures:
            self.free()
            raise MemoryError(self._refusal("pinned host memory", f"CUDA error {failures[0]}"))

    def _refusal(self, kind: str, why: str) -> str:
        return (
            f"the {self._what} need {self.nbytes / 2**30:.1f} GiB of {kind}, but the system gave "
            f"none ({why}); raise gpu_budget, train on a shorter context, or free host memory"
        )

    def free(self) -> None:
        """See `HostMemory`."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered = []
        self.pieces = []
        self._mapping = None  # unmapped when the last tensor over it is gone


def _register(piece: torch.Tensor) -> int:
    """Register a piece; 0, or CUDA's error code."""
    return int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
