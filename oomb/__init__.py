"""OOMB: train on a million tokens with one GPU, and watch how it works."""

from oomb.config import EngineConfig
from oomb.engine import Engine
from oomb.profiling import load_recording
from oomb.results import ChunkState, StepResult

__version__ = "0.1.0"

__all__ = ["ChunkState", "Engine", "EngineConfig", "StepResult", "load_recording"]
