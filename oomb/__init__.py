"""OOMB: train a language model on contexts longer than a GPU holds, and watch how it works."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomb import profiling
    from oomb.config import EngineConfig, OffloadConfig, SparseConfig
    from oomb.engine import Engine
    from oomb.profiling import load_recording
    from oomb.results import ChunkState, StepResult

__version__ = "0.1.0"

__all__ = [
    "ChunkState",
    "Engine",
    "EngineConfig",
    "OffloadConfig",
    "SparseConfig",
    "StepResult",
    "load_recording",
    "profiling",
]

_HOMES = {
    "ChunkState": "oomb.results",
    "Engine": "oomb.engine",
    "EngineConfig": "oomb.config",
    "OffloadConfig": "oomb.config",
    "SparseConfig": "oomb.config",
    "StepResult": "oomb.results",
    "load_recording": "oomb.profiling",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `oomb --help` need not load torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "profiling":
        return importlib.import_module("oomb.profiling")
    raise AttributeError(f"module 'oomb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
