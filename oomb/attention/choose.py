"""Which attention backend a model gets."""

from __future__ import annotations

import logging

import torch

from oomb.attention.api import Backend
from oomb.attention.impl import library, reference

log = logging.getLogger("oomb")


def choose_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: set[int],
    deterministic: bool = False,
    windows: bool = False,
) -> Backend:
    """The attention backend for a model or a layer, or a refusal that says why.

    Args:
        name: `auto`, `library` or `reference`.
        device: where the model lives.
        dtype: dtype of its K and V.
        head_dims: head dims of its layers.
        deterministic: whether every run must give the same bits.
        windows: whether a sliding window shorter than the sequence must be masked.

    Returns:
        The backend; where `auto` chose, the logger `oomb` says what and why.

    Raises:
        ValueError: the named backend cannot run this model here.
    """
    if name not in ("auto", "library", "reference"):
        raise ValueError(
            f"attention_backend must be 'auto', 'library' or 'reference', got {name!r}"
        )
    if name == "reference":
        return reference.ReferenceBackend()
    obstacle = library.obstacle(device, dtype, head_dims, deterministic=deterministic)
    if windows:
        obstacle = obstacle or "a layer's sliding window is shorter than the sequence"
    if obstacle is None:
        chosen: Backend = library.make_backend(device)
    elif name == "library":
        raise ValueError(
            f"attention_backend='library' cannot run here: {obstacle}; use 'reference' or 'auto'"
        )
    else:
        chosen = reference.ReferenceBackend()
    if name == "auto":
        reason = f" ({obstacle})" if obstacle else ""
        log.info("attention_backend='auto' chose '%s'%s", chosen.name, reason)
    return chosen
