"""A recording of an offloaded step that never ran, with waits where a test wants them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oomb.profiling.event import KINDS
from oomb.profiling.recording import COLUMNS, LATER_COLUMNS, NONE, PHASES, Recording

MS = 1_000_000
T0 = 123 * 2**53 + 7
"""The first moment, nanoseconds; too large for a double."""


class Writer:
    """Rows of a recording, by one clock for each stream."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.now = T0

    def add(self, kind: str, start: int, stop: int, **values) -> int:
        """A row; returns its number."""
        number = len(self.rows)
        row = {"t_ns": start, "dur_ns": stop - start, "step": 0, "kind": KINDS.index(kind)}
        rest = {"enqueue_ns": start - 3 * MS, "number": number, "backward": 0}
        self.rows.append({**rest, **row, **values})
        return number

    def stage(self, kind: str, ns: int, **values) -> None:
        """A stage of the compute stream, now."""
        self.now += ns
        self.add(kind, self.now - ns, self.now, **values)

    def recording(self, source: str) -> Recording:
        """What was written."""
        columns = {
            name: np.array([row.get(name, NONE) for row in self.rows], dtype)
            for name, dtype in {**COLUMNS, **LATER_COLUMNS}.items()
        }
        header = {
            "format": 1, "source": source, "kinds": [*KINDS], "phases": [*PHASES],
            "columns": [*columns], "events": len(self.rows), "notes": {},
        }  # fmt: skip
        return Recording(header, columns)


def synthetic(
    chunks: int = 8,
    layers: int = 4,
    segments: int = 2,
    waits: Mapping[tuple[str, int, int], int] | None = None,
    source: str = "simulated",
) -> Recording:
    """A step in which every copy is hidden but those of `waits`.

    Args:
        chunks: of the sequence; fill leaves the last one out.
        layers: of the model.
        segments: that each layer of each chunk reads, one copy each.
        waits: (phase, chunk, layer) -> nanoseconds that its forward waits for its first copy.
        source: where it claims to come from.
    """
    writer, waits = Writer(), dict(waits or {})
    for phase, order in (("fill", range(chunks - 1)), ("sweep", reversed(range(chunks)))):
        begun = writer.now
        for chunk in order:
            start = writer.now
            for back in (0, 1) if phase == "sweep" else (0,):
                for layer in reversed(range(layers)) if back else range(layers):
                    place = {
                        "phase": PHASES.index(phase),
                        "chunk": chunk,
                        "layer": layer,
                        "backward": back,
                    }
                    late = 0 if back else waits.pop((phase, chunk, layer), 0)
                    _layer(writer, segments, late, place)
            writer.add("chunk", start, writer.now, phase=PHASES.index(phase), chunk=chunk)
            writer.now += 20_000
        writer.add("phase", begun, writer.now - 20_000, phase=PHASES.index(phase))
    assert not waits, f"no such place: {waits}"
    return writer.recording(source)


def _layer(writer: Writer, segments: int, late: int, place: dict[str, int]) -> None:
    begun = writer.now
    writer.stage("projection", 3 * MS // 10, **place)
    attention = writer.now
    for segment in range(segments):
        arrives = writer.now + late if late and segment == 0 else writer.now
        copy = writer.add("copy_in", writer.now - 2 * MS // 10, arrives, nbytes=1 << 22, **place)
        wait = {"waits_on": copy, **place}
        writer.add("wait", writer.now, arrives, **wait)
        writer.now = arrives + 3 * MS // 10
    writer.add("attention", attention, writer.now, **place)
    writer.stage("mlp", 5 * MS // 10, **place)
    writer.add("copy_out", writer.now - MS // 10, writer.now, nbytes=1 << 21, **place)
    writer.add("layer", begun, writer.now, **place)
