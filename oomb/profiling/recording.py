"""Recordings: the engine's events in a file, `run.oomb`.

The file is a zip of `header.json` (format version, names behind the numbers, what made it) and one
`events/<column>.npy` per column, little-endian, one row per event. Readers ignore columns they do
not know; the later columns, where the header does not name them, are filled with -1.

`header.json` holds `format` (1), `events` (rows), `columns` (names), `kinds` and `phases` (words
that the columns of those names count through, from 0), `source` (`cuda`, `cpu`, or `simulated`
where a CPU stood in for both tiers), `clock` (`device` or `host`), `torch` (version) and `notes`
(anything). The columns, -1 where there is none:

- `t_ns`, `dur_ns` (int64): begin and length in nanoseconds, as of `time.perf_counter_ns`.
- `step` (int32), `phase` (int8), `chunk`, `layer` (int32): where it belongs.
- `kind` (int8), `backward` (int8, 0 or 1): what it is, and whether it is part of a backward.
- `enqueue_ns` (int64): when the host launched it.
- `number` (int64): no other event of the step has it.
- `nbytes` (int64): moved by a copy. `waits_on` (int64): number of the copy that a wait waited for.

Rows come in the order of the events' ends. All kinds but copies share one track, on which spans
nest and never cross: phase, chunk, layer, then projection (around attention) and mlp.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from oomb.profiling.event import KINDS, Event
from oomb.whole_file import whole_file

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
NPY_HEADER_BYTES = 4096
PHASES = ("fill", "sweep", "evaluate")
NONE = -1
COLUMNS: dict[str, str] = {
    "t_ns": "<i8",
    "dur_ns": "<i8",
    "step": "<i4",
    "phase": "|i1",
    "chunk": "<i4",
    "layer": "<i4",
    "kind": "|i1",
    "backward": "|i1",
}
LATER_COLUMNS: dict[str, str] = {
    "enqueue_ns": "<i8",
    "number": "<i8",
    "nbytes": "<i8",
    "waits_on": "<i8",
}


@dataclass
class Recorder:
    """Collects the engine's events; pass it as `EngineConfig(recorder=...)`.

    Attributes:
        events: in order of their end.
        notes: free facts for the header, such as model and context.
    """

    events: list[Event] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def on_event(self, event: Event) -> None:
        """Take one event."""
        self.events.append(event)

    def recording(self) -> Recording:
        """What was recorded so far, as `load_recording` would read it back."""
        header = {
            "format": FORMAT_VERSION,
            "source": self._source(),
            "clock": "device" if torch.cuda.is_initialized() else "host",
            "kinds": list(KINDS),
            "phases": list(PHASES),
            "torch": torch.__version__,
            "columns": [*COLUMNS, *LATER_COLUMNS],
            "events": len(self.events),
            "notes": self.notes,
        }
        return Recording(header, self._columns())

    def _source(self) -> str:
        if torch.cuda.is_initialized():
            return "cuda"
        copied = any(event.kind in ("copy_in", "copy_out") for event in self.events)
        return "simulated" if copied else "cpu"  # a CPU has nowhere to copy pages to

    def save(self, path: str | os.PathLike) -> Path:
        """Write the recording. The file appears whole or not at all.

        Args:
            path: the file to write; an existing one is replaced.

        Returns:
            The path.

        Raises:
            OSError: the folder does not exist or cannot be written.
            TypeError: `notes` holds what JSON cannot.
        """
        path, recording = Path(path), self.recording()
        with whole_file(path) as part:
            recording.write(part)
        return path

    def _columns(self) -> dict[str, np.ndarray]:
        def number(value: int | None) -> int:
            return NONE if value is None else value

        rows = [
            (
                event.t_ns,
                event.dur_ns,
                number(event.step),
                PHASES.index(event.phase) if event.phase else NONE,
                number(event.chunk),
                number(event.layer),
                KINDS.index(event.kind),
                event.backward,
                *(number(getattr(event, name)) for name in LATER_COLUMNS),
            )
            for event in self.events
        ]
        dtypes = {**COLUMNS, **LATER_COLUMNS}
        columns = zip(*rows, strict=True) if rows else [()] * len(dtypes)
        return {
            name: np.array(values, dtype=dtype)
            for (name, dtype), values in zip(dtypes.items(), columns, strict=True)
        }


@dataclass(frozen=True)
class Recording:
    """A recording read back: the header, and one array per known column."""

    header: dict[str, Any]
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["t_ns"])

    def write(self, file: str | os.PathLike | BinaryIO) -> None:
        """Write it as a `run.oomb`, into a path or an open file.

        Args:
            file: what to write to.

        Raises:
            OSError: it cannot be written.
            TypeError: the header's notes hold what JSON cannot.
        """
        header = {**self.header, "events": len(self), "columns": [*self.columns]}
        text = json.dumps(header, indent=1)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("header.json", text)
            for name, column in self.columns.items():
                buffer = io.BytesIO()
                np.save(buffer, column, allow_pickle=False)
                archive.writestr(f"events/{name}.npy", buffer.getvalue())

    def seconds(self, kind: str, phase: str | None = None) -> float:
        """Total seconds of one kind of stage, in one phase or in all.

        Stages nest: `layer` holds `projection` and `mlp`, and `projection` holds `attention`.
        """
        chosen = self._of(kind)
        if phase is not None:
            chosen &= self.columns["phase"] == self.header["phases"].index(phase)
        return float(self.columns["dur_ns"][chosen].sum()) / 1e9

    def nbytes(self, kind: str) -> int:
        """Bytes that one kind of copy moved."""
        moved = self.columns["nbytes"][self._of(kind)]
        return int(moved[moved != NONE].sum())

    @property
    def hidden_share(self) -> float | None:
        """Share of the copies' time during which kernels did not wait for them; None without any.

        1 - (time that kernels waited for copies) / (time that copies took), both directions.
        """
        copies = self.seconds("copy_in") + self.seconds("copy_out")
        return 1 - self.seconds("wait") / copies if copies else None

    def _of(self, kind: str) -> np.ndarray:
        return self.columns["kind"] == self.header["kinds"].index(kind)


def load_recording(path: str | os.PathLike) -> Recording:
    """Read a `run.oomb` file.

    Args:
        path: the file.

    Returns:
        Its header and columns.

    Raises:
        OSError: the file does not exist or cannot be read.
        ValueError: the file is not a recording, is damaged, or is of a newer format.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive)
        except _NewerFormatError as error:
            raise ValueError(f"{path} {error}") from None
        except Exception as error:  # a damaged zip raises nearly anything
            raise ValueError(f"{path} is damaged or no oomb recording: {error}") from error


class _NewerFormatError(ValueError):
    """Written by a later version."""


def _read(archive: zipfile.ZipFile) -> Recording:
    if archive.getinfo("header.json").file_size > MAX_HEADER_BYTES:
        raise ValueError("its header is too large")
    header = json.loads(archive.read("header.json"))
    if header["format"] > FORMAT_VERSION:
        raise _NewerFormatError(
            f"has recording format {header['format']}, this version reads up to "
            f"{FORMAT_VERSION}; update oomb"
        )
    rows, names = int(header["events"]), set(archive.namelist())
    columns = {}
    for name, dtype in {**COLUMNS, **LATER_COLUMNS}.items():
        member = f"events/{name}.npy"
        if name not in header.get("columns", COLUMNS):
            columns[name] = np.full(rows, NONE, dtype)
            continue
        if member not in names:
            raise ValueError(f"it has no column {name}")
        if archive.getinfo(member).file_size > rows * np.dtype(dtype).itemsize + NPY_HEADER_BYTES:
            raise ValueError(f"column {name} is larger than its {rows} events")
        column = np.load(io.BytesIO(archive.read(member)), allow_pickle=False)
        if column.shape != (rows,) or column.dtype != np.dtype(dtype):
            raise ValueError(
                f"column {name} is {column.dtype} {column.shape}, not {rows} x {dtype}"
            )
        columns[name] = column
    for name, words in (("kind", header["kinds"]), ("phase", header["phases"])):
        if rows and not (columns[name].min() >= NONE and columns[name].max() < len(words)):
            raise ValueError(f"column {name} has numbers without a name")
    return Recording(header, columns)
