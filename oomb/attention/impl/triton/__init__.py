"""Triton kernels that read K and V through a page table, page by page, wherever pages lie.

`forward.py` and `backward.py` hold the kernels and their launches, `primitives.py` what they share,
`configs.py` the tile sizes per device, `backend.py` what the engine calls.
"""

from __future__ import annotations

import importlib.util
import os

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 256
OLDEST = (8, 0)
"""Compute capability of Ampere."""


def obstacle(device: torch.device, dtype: torch.dtype, head_dims: set[int]) -> str | None:
    """Look for a reason why these kernels cannot run a model here.

    Args:
        device: where the model lives.
        dtype: dtype of its K and V.
        head_dims: head dims of its layers.

    Returns:
        The reason, as part of a sentence, or None if they can.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        return (
            f"it needs a CUDA GPU, the model is on {device.type} (TRITON_INTERPRET=1, set before "
            "Python starts, runs it slowly on a CPU)"
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        return "it needs a CUDA GPU, torch.cuda.is_available() is False"
    if dtype not in DTYPES:
        names = ", ".join(str(each) for each in DTYPES)
        return f"its dtypes are {names}, the model's K and V are {dtype}"
    if interpreted and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices wrongly; use float32 or float16"
    if not interpreted and torch.cuda.get_device_capability(device) < OLDEST:
        major, minor = torch.cuda.get_device_capability(device)
        return f"it needs compute capability 8.0 (Ampere) or newer, this GPU has {major}.{minor}"
    wrong = sorted(dim for dim in head_dims if dim % HEAD_DIM_STEP or dim > MAX_HEAD_DIM)
    if wrong:
        return (
            f"head_dim must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got {wrong[0]}"
        )
    return None
