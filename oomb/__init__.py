"""OOMB: train a language model on contexts longer than a GPU holds, and watch how it works."""

from oomb import profiling
from oomb.config import EngineConfig
from oomb.engine import Engine
from oomb.profiling import load_recording
from oomb.results import ChunkState, StepResult

__version__ = "0.1.0"

__all__ = ["ChunkState", "Engine", "EngineConfig", "StepResult", "load_recording", "profiling"]
