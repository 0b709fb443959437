"""Recordings: the engine's events in a file, `run.oomb`.

The file is a zip of `header.json` (format version, names behind the numbers, what made it) and one
`events/<column>.npy` per column, little-endian, one row per event. Readers ignore columns they do
not know.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oomb.profiling.stage import KINDS, Event

FORMAT_VERSION = 1
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


@dataclass
class Recorder:
    """Collects the engine's events; pass it as `EngineConfig(recorder=...)`.

    Attributes:
        events: (step, event) pairs in order of their end.
        notes: free facts for the header, such as model and context.
    """

    events: list[tuple[int, Event]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    _step: int = 0

    def on_event(self, event: Event) -> None:
        """Take one event; the container `phase` of a sweep closes a step."""
        self.events.append((self._step, event))
        if event.kind == "phase" and event.phase == "sweep":
            self._step += 1

    def save(self, path: str | os.PathLike) -> Path:
        """Write the recording. The file appears whole or not at all.

        Raises:
            OSError: the folder does not exist or cannot be written.
            TypeError: `notes` holds what JSON cannot.
        """
        path = Path(path)
        header = {
            "format": FORMAT_VERSION,
            "source": "cuda" if torch.cuda.is_available() else "cpu",
            "clock": "host",
            "kinds": list(KINDS),
            "phases": list(PHASES),
            "torch": torch.__version__,
            "notes": self.notes,
        }
        text = json.dumps(header, indent=1)
        part = path.with_name(path.name + ".part")
        try:
            with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("header.json", text)
                for name, column in self._columns().items():
                    buffer = io.BytesIO()
                    np.save(buffer, column, allow_pickle=False)
                    archive.writestr(f"events/{name}.npy", buffer.getvalue())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return path

    def _columns(self) -> dict[str, np.ndarray]:
        def number(value: int | None) -> int:
            return NONE if value is None else value

        rows = [
            (
                event.t_ns,
                event.dur_ns,
                step,
                PHASES.index(event.phase) if event.phase else NONE,
                number(event.chunk),
                number(event.layer),
                KINDS.index(event.kind),
                event.backward,
            )
            for step, event in self.events
        ]
        columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
        return {
            name: np.array(values, dtype=dtype)
            for (name, dtype), values in zip(COLUMNS.items(), columns, strict=True)
        }


@dataclass(frozen=True)
class Recording:
    """A recording read back: the header, and one array per known column."""

    header: dict[str, Any]
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["t_ns"])

    def seconds(self, kind: str, phase: str | None = None) -> float:
        """Total host seconds of one kind of stage, in one phase or in all."""
        chosen = self.columns["kind"] == self.header["kinds"].index(kind)
        if phase is not None:
            chosen &= self.columns["phase"] == self.header["phases"].index(phase)
        return float(self.columns["dur_ns"][chosen].sum()) / 1e9


def load_recording(path: str | os.PathLike) -> Recording:
    """Read a `run.oomb` file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a recording, or of a newer format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("header.json"))
            if header["format"] > FORMAT_VERSION:
                raise ValueError(
                    f"{path} has recording format {header['format']}, this version reads up to "
                    f"{FORMAT_VERSION}; update oomb"
                )
            names = set(archive.namelist())
            columns = {
                name: np.load(io.BytesIO(archive.read(f"events/{name}.npy")), allow_pickle=False)
                for name in COLUMNS
                if f"events/{name}.npy" in names
            }
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is not an oomb recording: {error}") from error
    missing = {"t_ns", "dur_ns", "kind", "phase"} - columns.keys()
    if missing or len({len(column) for column in columns.values()}) != 1:
        raise ValueError(f"{path} is damaged: missing or uneven columns {sorted(missing)}")
    return Recording(header, columns)
