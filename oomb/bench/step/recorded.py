"""What a recorded step says of its copies, and what recording costs."""

from __future__ import annotations

from typing import Any

from oomb.profiling import Recording

GIB = 2**30
COPIES = ("copy_in", "copy_out")


def summary(recording: Recording, seconds: float) -> dict[str, Any]:
    """Sum a recording up.

    Args:
        recording: of a step, or of some of its chunks.
        seconds: that it took.

    Returns:
        JSON-ready: `seconds`; `events`; `waited_seconds`, the time that kernels waited for copies;
        `hidden_share`, as `Recording.hidden_share`; and by direction `seconds` and `gib` of copies.
    """
    return {
        "seconds": seconds,
        "events": len(recording),
        "waited_seconds": recording.seconds("wait"),
        "hidden_share": recording.hidden_share,
        **{
            kind: {"seconds": recording.seconds(kind), "gib": recording.nbytes(kind) / GIB}
            for kind in COPIES
        },
    }
