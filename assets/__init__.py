"""What ships with OOMB beside its code: a small trained model, its text, and measurements."""

from __future__ import annotations

import gzip
from pathlib import Path

TEXT_PARTS = ("pretrain", "finetune", "validation", "heldout")


def demo_model_dir() -> Path:
    """Folder of the small demo model, in the layout that transformers' from_pretrained reads."""
    return Path(__file__).parent / "demo_model"


def results_dir() -> Path:
    """Folder of the recorded measurements, JSON as the benchmarks write it."""
    return Path(__file__).parent / "results"


def demo_text(part: str) -> str:
    """One part of the shipped text (King James Bible; SOURCES.md has source and licence).

    Args:
        part: "pretrain" (Old Testament), "finetune" (Matthew, Luke), "validation" (John) or
            "heldout" (Mark).

    Returns:
        The text: a heading per chapter, one numbered verse per line.

    Raises:
        ValueError: `part` is none of these.
    """
    if part not in TEXT_PARTS:
        raise ValueError(f"part must be one of {', '.join(TEXT_PARTS)}; got {part!r}")
    path = Path(__file__).parent / "text" / f"{part}.txt.gz"
    return gzip.decompress(path.read_bytes()).decode("utf-8")
