"""Which attention backend a model gets."""

from __future__ import annotations

import logging

import torch

from oomb.attention.api import Backend
from oomb.attention.impl import library, reference
from oomb.attention.impl.triton import obstacle as triton_obstacle

log = logging.getLogger("oomb")
BACKENDS = ("auto", "library", "triton", "reference")
"""Names; `auto` tries the others in this order."""
SPARSE = ("reference",)
"""Those that can attend to chosen pages."""
_NAMES = ", ".join(repr(name) for name in BACKENDS)


def choose_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: set[int],
    deterministic: bool = False,
    windows: bool = False,
    documents: bool = False,
    sparse: bool = False,
    accumulate: str = "owner",
) -> Backend:
    """The attention backend for a model or a layer, or a refusal that says why.

    Args:
        name: `auto`, `library`, `triton` or `reference`.
        device: where the model lives.
        dtype: dtype of its K and V.
        head_dims: head dims of its layers.
        deterministic: whether every run must give the same bits.
        windows: whether a sliding window shorter than the sequence must be masked.
        documents: whether rows hold several documents or differ in length.
        sparse: whether queries read pages of history that they have chosen.
        accumulate: how `triton` adds to page gradients, `owner` or `atomic`; `atomic` is not for
            other backends.

    Returns:
        The backend; where `auto` chose, the logger `oomb` says what and why.

    Raises:
        ValueError: the named backend cannot run this model here.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention_backend must be one of {_NAMES}, got {name!r}")
    if accumulate == "atomic":
        if name != "triton":
            raise ValueError(
                f"accumulate='atomic' is for attention_backend='triton', got {name!r}; name that "
                "backend, or use accumulate='owner'"
            )
        if deterministic:
            raise ValueError(
                "accumulate='atomic' adds in another order on every run and deterministic=True; "
                "use accumulate='owner'"
            )
    facts = {"device": device, "dtype": dtype, "head_dims": head_dims}
    obstacles = {}
    for candidate in BACKENDS[1:] if name == "auto" else (name,):
        obstacle = _obstacle(candidate, **facts, deterministic=deterministic, windows=windows)
        if sparse and candidate not in SPARSE:
            obstacle = obstacle or "it has no sparse attention"
        if name == "auto" and candidate == "triton" and device.type != "cuda":
            obstacle = obstacle or "its interpreter is slow, and used only where it is named"
        if name == "auto" and obstacle is None and candidate == "library" and documents:
            # cuDNN plans anew for every shape, and documents come in all lengths.
            triton_can = _obstacle("triton", **facts, deterministic=False, windows=False) is None
            if device.type == "cuda" and triton_can:
                obstacle = "rows hold several documents or differ in length"
        if obstacle is None:
            break
        obstacles[candidate] = obstacle
    else:
        raise ValueError(
            f"attention_backend={name!r} cannot run here: {obstacles[name]}; use 'reference' or "
            "'auto'"
        )
    if name == "auto":
        reasons = "; ".join(f"not '{other}': {why}" for other, why in obstacles.items())
        log.info(
            "attention_backend='auto' chose '%s'%s", candidate, f" ({reasons})" if reasons else ""
        )
    return _make(candidate, device, accumulate, deterministic=deterministic)


def _obstacle(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: set[int],
    deterministic: bool,
    windows: bool,
) -> str | None:
    """Why a backend cannot run, as part of a sentence, or None if it can."""
    if name == "library":
        obstacle = library.obstacle(device, dtype, head_dims, deterministic=deterministic)
        return obstacle or (
            "a layer's sliding window is shorter than the sequence" if windows else None
        )
    if name == "triton":
        return triton_obstacle(device, dtype, head_dims)
    return None


def _make(name: str, device: torch.device, accumulate: str, *, deterministic: bool) -> Backend:
    if name == "library":
        return library.make_backend(device)
    if name == "triton":
        from oomb.attention.impl.triton.backend import TritonBackend

        return TritonBackend(accumulate, by_segment=deterministic)
    return reference.ReferenceBackend()
