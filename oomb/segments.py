"""How many pages make a segment."""

from __future__ import annotations

from oomb.config import EngineConfig

MAX_SEGMENT_TOKENS = 32768


def segment_pages(config: EngineConfig, pages_per_row: list[int]) -> int:
    """As configured, else as `_long_segment` says; a short sequence gets no more than it needs."""
    wanted = config.segment_pages or _long_segment(config, pages_per_row)
    return max(1, min(wanted, max(pages_per_row)))


def _long_segment(config: EngineConfig, pages_per_row: list[int]) -> int:
    """Pages of the longest segment that leaves at most a chunk, or an eighth, of the pool empty.

    Long segments run attention kernels at their full rate and are rarely merged. Whole chunks give
    few shapes: history grows by a chunk at a time.
    """
    chunk = config.chunk_size // config.page_size
    most = max(chunk, MAX_SEGMENT_TOKENS // config.page_size)

    def pool(segment: int) -> int:
        return sum(-(-pages // segment) * segment for pages in pages_per_row)

    allowed = pool(chunk) + max(chunk, pool(chunk) // 8)
    return max(size for size in range(chunk, most + 1, chunk) if pool(size) <= allowed)
