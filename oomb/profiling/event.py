"""What a finished stage tells whoever watches."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    *("phase", "chunk", "layer"),  # containers
    *("projection", "selection", "attention", "mlp", "loss"),
    *("copy_in", "copy_out", "wait", "optimizer"),
)


@dataclass(frozen=True)
class Event:
    """One finished stage.

    On a GPU, times are those of the stream that the stage ran on; the host launches it earlier.

    Attributes:
        kind: one of `KINDS`.
        phase: `fill`, `sweep` or `evaluate`; None outside of a step.
        chunk: chunk number, or None. A copy's is that of the chunk that asked for it.
        layer: layer number, or None.
        t_ns: time of the start, nanoseconds on the scale of `time.perf_counter_ns`.
        dur_ns: time from start to end, nanoseconds. A wait lasts until the last copy that it waits
            for is done; 0 where that was before it began.
        backward: whether the stage belongs to a backward pass.
        step: number of the engine's step, from 0; None outside of a step.
        enqueue_ns: host time at which the stage was launched, nanoseconds.
        number: no other event of the step has it.
        nbytes: bytes that a copy moved; None for other kinds.
        waits_on: number of the copy that a wait waited for longest; None for other kinds.
    """

    kind: str
    phase: str | None
    chunk: int | None
    layer: int | None
    t_ns: int
    dur_ns: int
    backward: bool
    step: int | None = None
    enqueue_ns: int | None = None
    number: int | None = None
    nbytes: int | None = None
    waits_on: int | None = None
