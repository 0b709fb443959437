"""Count the bytes of live tensors, storage by storage, on any device.

Tensors are seen where PyTorch dispatches their operators, so nothing hides in a checkpoint, on
an autograd context or behind a view; a storage counts from its first appearance until it is
freed. Scratch memory inside a single kernel is not seen.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

OTHER = "other"
_current_category = ContextVar("_current_category", default=OTHER)  # every thread has its own


@contextmanager
def category(name: str) -> Iterator[None]:
    """Count storages made inside under `name` instead of `other`."""
    token = _current_category.set(name)
    try:
        yield
    finally:
        _current_category.reset(token)


class LiveBytes(TorchDispatchMode):
    """Bytes of tensor storages made inside the `with` block and still alive.

    Attributes:
        current_by: live bytes now, by category.
        peak_by: highest live bytes so far, by category.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_by: dict[str, int] = defaultdict(int)
        self.peak_by: dict[str, int] = defaultdict(int)
        self._seen: dict[int, _Storage] = {}

    @property
    def current(self) -> int:
        """Live bytes now of activations and temporaries: all that has no category of its own."""
        return self.current_by[OTHER]

    @property
    def peak(self) -> int:
        """Highest live bytes so far of activations and temporaries."""
        return self.peak_by[OTHER]

    def reset_peak(self) -> None:
        """Start counting peaks again from what is alive now."""
        self.peak_by = defaultdict(int, self.current_by)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What existed before the operator is an input (parameters, data) and is not ours to count,
        # except the tensor that torch.tensor(...) has just made out of sight.
        made_now = func is torch.ops.aten.lift_fresh.default
        for tensor in _strided((args, kwargs)):
            self._note(tensor, new=made_now)
        result = func(*args, **(kwargs or {}))
        for tensor in _strided(result):
            self._note(tensor, new=True)
        return result

    def _note(self, tensor: torch.Tensor, *, new: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._seen.get(key)
        if known is None:
            known = self._seen[key] = _Storage(_current_category.get() if new else None)
            weakref.finalize(storage, self._forget, key).atexit = False
        if known.category is not None and size != known.size:  # new, or resized
            name = known.category
            self.current_by[name] += size - known.size
            self.peak_by[name] = max(self.peak_by[name], self.current_by[name])
            known.size = size

    def _forget(self, key: int) -> None:
        gone = self._seen.pop(key)
        if gone.category is not None:
            self.current_by[gone.category] -= gone.size


@dataclass
class _Storage:
    """A storage met so far: its category, None if it is not ours, and the bytes counted for it."""

    category: str | None
    size: int = 0


def _strided(tree: Any) -> Iterator[torch.Tensor]:
    """Tensors in a tree of arguments that own ordinary memory: not sparse, not on `meta`."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_meta:
            yield leaf
