"""Where and when something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform

import torch

PACKAGES = ("transformers", "triton", "liger-kernel")


def machine_facts(device: torch.device) -> dict[str, str | None]:
    """Date, machine and versions.

    Args:
        device: where the work ran.

    Returns:
        Facts by name; None for a GPU or package that is not there.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "cudnn": _cudnn() if device.type == "cuda" else None,
        **{name.replace("-", "_"): _version(name) for name in PACKAGES},
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn() -> str | None:
    version = torch.backends.cudnn.version()
    return None if version is None else str(version)
