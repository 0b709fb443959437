"""Attention over paged history, a segment at a time."""

from oomb.attention.api import Backend, Mask
from oomb.attention.choose import choose_backend
from oomb.attention.function import ChunkAttention, LayerCall, attend

__all__ = ["Backend", "ChunkAttention", "LayerCall", "Mask", "attend", "choose_backend"]
