"""A tier without a GPU: threads stand for the streams, and each takes its time.

Only this file differs from what runs on a GPU, so that a CPU can teach and test the rest. Copies
run on two threads, in order and after random delays. Kernels are late too: what the caller did to
a buffer between `begin` and `end` is taken back and happens after a delay on a third thread, as it
would on a GPU that has yet to reach it. Whoever does not wait finds old numbers, or loses new ones.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from oomb.offload.tier import Done, Pairs, copying
from oomb.profiling.stage import Stage

LONGEST_DELAY = 2e-4
"""Seconds; half of the tasks start at once."""
SLOWNESS = (0, 1, 10)
"""A stream's delays are as many times as long, drawn once: any may be far behind the others."""


class SimulatedTier:
    """Threads for the compute stream and for two copy streams.

    Args:
        seed: of the delays.
        longest_delay: seconds.
    """

    name = "simulated"

    def __init__(self, seed: int = 0, longest_delay: float = LONGEST_DELAY) -> None:
        rng = random.Random(seed)
        self._compute, self._in, self._out = (
            _Stream(name, random.Random(rng.random()), longest_delay * rng.choice(SLOWNESS))
            for name in ("compute", "copy in", "copy out")
        )
        self._before: dict[int, torch.Tensor] = {}
        self._late: dict[int, Done] = {}

    def wait(self, after: Sequence[Done]) -> None:
        """See `Tier`."""
        for done in after:
            done.event.wait()

    def begin(self, buffer: torch.Tensor, after: Sequence[Done]) -> None:
        """See `Tier`."""
        if buffer.data_ptr() in self._late:  # kernels of one stream run in order
            self._late.pop(buffer.data_ptr()).event.wait()
        self.wait(after)
        self._before[buffer.data_ptr()] = buffer.clone()

    def end(self, buffer: torch.Tensor) -> Done:
        """See `Tier`."""
        after = buffer.clone()
        buffer.copy_(self._before.pop(buffer.data_ptr()))
        late = Done(self._compute.launch(lambda: buffer.copy_(after), ()))
        self._late[buffer.data_ptr()] = late
        return late

    def copy_in(self, pairs: Pairs, after: Sequence[Done], layer: int) -> Done:
        """See `Tier`."""
        return _launch(self._in, copying("copy_in", pairs, layer), pairs, after)

    def copy_out(self, pairs: Pairs, after: Sequence[Done], layer: int) -> Done:
        """See `Tier`."""
        return _launch(self._out, copying("copy_out", pairs, layer), pairs, after)

    def settle(self) -> None:
        """See `Tier`."""
        self.drain()

    def drain(self) -> None:
        """See `Tier`."""
        for stream in (self._compute, self._in, self._out):
            stream.launch(lambda: None, ()).wait()
        self._late.clear()

    def host_memory(self, sizes: Sequence[int], what: str) -> OrdinaryMemory:
        """See `Tier`."""
        return OrdinaryMemory(sizes)

    def close(self) -> None:
        """See `Tier`."""
        for stream in (self._compute, self._in, self._out):
            stream.close()


class OrdinaryMemory:
    """Host memory that no GPU knows of."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.pieces = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.nbytes = sum(sizes)

    def free(self) -> None:
        """See `HostMemory`."""
        self.pieces = []


class _Event:
    """Set once its task has run; carries the task's error to whoever waits."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self.error: BaseException | None = None

    def happen(self, error: BaseException | None) -> None:
        self.error = error
        self._set.set()

    def wait(self) -> None:
        self._set.wait()
        if self.error is not None:
            raise RuntimeError("a simulated stream failed") from self.error


class _Stream:
    """A thread that runs tasks in order, each once what it comes after has happened."""

    def __init__(self, name: str, rng: random.Random, longest_delay: float) -> None:
        self._rng, self._longest = rng, longest_delay
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"oomb {name}", daemon=True)
        self._thread.start()

    def launch(self, task: Callable[[], object], after: Sequence[Done]) -> _Event:
        event = _Event()
        self._tasks.put((task, tuple(after), event))
        return event

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.no_grad():
            while (item := self._tasks.get()) is not None:
                task, after, event = item
                error = None
                try:
                    for done in after:
                        done.event.wait()
                    if self._rng.random() < 0.5:
                        time.sleep(self._rng.uniform(0, self._longest))
                    task()
                except BaseException as raised:
                    error = raised
                event.happen(error)


def _launch(stream: _Stream, copying: Stage, pairs: Pairs, after: Sequence[Done]) -> Done:
    def task() -> None:
        with copying:
            _copy(pairs)

    return Done(stream.launch(task, after), copying.span)


def _copy(pairs: Pairs) -> None:
    for to, source in pairs:
        to.copy_(source)
