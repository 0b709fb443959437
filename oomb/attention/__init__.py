"""Attention over paged history, a segment at a time."""

from oomb.attention.api import Backend, LayerCall, Mask
from oomb.attention.choose import choose_backend
from oomb.attention.function import ChunkAttention, attend, attend_backward

__all__ = [
    "Backend",
    "ChunkAttention",
    "LayerCall",
    "Mask",
    "attend",
    "attend_backward",
    "choose_backend",
]
