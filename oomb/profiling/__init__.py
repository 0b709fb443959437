"""Watching the engine: stages, events, recordings and live bytes."""

from oomb.profiling.event import Event
from oomb.profiling.live_bytes import LiveBytes, category
from oomb.profiling.recording import Recorder, Recording, load_recording
from oomb.profiling.stage import stage

__all__ = [
    "Event",
    "LiveBytes",
    "Recorder",
    "Recording",
    "category",
    "load_recording",
    "stage",
]
