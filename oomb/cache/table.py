"""The page table: where each logical page of each row lives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oomb.chunking import Read

NO_SLOT = -1


@dataclass(frozen=True)
class PageTableView:
    """A read-only copy of the page table.

    Attributes:
        page_size: tokens per page.
        slots: int32 [rows, pages], the page's slot in the pool, or -1 where no page is held.
        terms: int32 [rows, pages], later chunks swept so far whose history holds the page: each has
            left its gradient term there (a zero one where a sliding window hides the page).
        used: int32 [rows, pages], tokens written into the page.
        on_host: bool [rows, pages], whether the page is held on the host.
    """

    page_size: int
    slots: np.ndarray
    terms: np.ndarray
    used: np.ndarray
    on_host: np.ndarray


class PageTable:
    """Maps (row, logical page) to a slot, in whole segments.

    A segment is a fixed number of consecutive pages that live side by side, so that one kernel
    call can attend to all of them; segments lie anywhere in the pool. Slots below `gpu_slots` are
    on the GPU, the others on the host; they are given out in order, so that the segments written
    first are on the GPU. Rows are independent: each numbers its own pages from 0, and each document
    starts on a new page.
    """

    def __init__(
        self,
        *,
        pages_per_row: list[int],
        page_size: int,
        segment_pages: int,
        gpu_slots: int | None = None,
    ) -> None:
        rows, pages = len(pages_per_row), max(pages_per_row, default=0)
        segments = -(-pages // segment_pages)
        self.page_size = page_size
        self.segment_pages = segment_pages
        self.num_slots = sum(-(-count // segment_pages) for count in pages_per_row)
        self.gpu_slots = self.num_slots if gpu_slots is None else min(gpu_slots, self.num_slots)
        self._segment_slots = np.full((rows, segments), NO_SLOT, dtype=np.int32)
        self._used = np.zeros((rows, segments * segment_pages), dtype=np.int32)
        self._terms = np.zeros_like(self._used)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self.version = 0  # counts the times that slots changed hands

    def segments(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Cut tokens [first, last) at segment borders.

        Args:
            first: logical token number.
            last: logical token number behind the last token.

        Returns:
            (segment, start, stop) per piece, with start and stop counted inside the segment.
        """
        size = self.segment_pages * self.page_size
        return [
            (index, max(first - index * size, 0), min(last - index * size, size))
            for index in range(first // size, -(-last // size))
        ]

    def seen(self, read: Read, window: int | None) -> list[tuple[int, int, int]]:
        """`segments` of a read, less those that a sliding window hides from all its queries."""
        pieces = self.segments(read.first, read.last)
        if window is None:
            return pieces
        size = self.segment_pages * self.page_size
        lowest = read.last - window + 1  # what the first query sees; the others see none before
        return [piece for piece in pieces if piece[0] * size + piece[2] > lowest]

    def slot(self, row: int, segment: int) -> int:
        """Slot of a held segment."""
        slot = int(self._segment_slots[row, segment])
        assert slot != NO_SLOT, f"row {row} holds no segment {segment}"
        return slot

    def hold(self, row: int, first: int, last: int) -> None:
        """Give tokens [first, last) of a row their slots and mark them written."""
        for segment, _, _ in self.segments(first, last):
            if self._segment_slots[row, segment] == NO_SLOT:
                self._segment_slots[row, segment] = self._free.pop()
                self.version += 1
        pages = np.arange(first // self.page_size, -(-last // self.page_size))
        self._used[row, pages] = np.minimum(last - pages * self.page_size, self.page_size)

    def add_term(self, row: int, first: int, last: int) -> None:
        """Count one more gradient term for the pages of tokens [first, last)."""
        self._terms[row, first // self.page_size : -(-last // self.page_size)] += 1

    def release(self, row: int, first: int) -> None:
        """Forget a row's tokens from `first` on; a page or segment emptied by this is freed."""
        page, rest = divmod(first, self.page_size)
        if rest:
            self._used[row, page] = rest
            page += 1
        self._used[row, page:] = 0
        self._terms[row, page:] = 0
        for segment in range(-(-page // self.segment_pages), self._segment_slots.shape[1]):
            if self._segment_slots[row, segment] != NO_SLOT:
                self._free.append(int(self._segment_slots[row, segment]))
                self._segment_slots[row, segment] = NO_SLOT
                self.version += 1

    def page_rows(self) -> np.ndarray:
        """int32 [rows, pages]: pool row of each page's first token; -1 where no slot is held.

        A slot has as many rows for V, behind those for K.
        """
        page = np.arange(self._used.shape[1], dtype=np.int64) % self.segment_pages
        slots = self._segment_slots.repeat(self.segment_pages, axis=1).astype(np.int64)
        rows = (2 * slots * self.segment_pages + page) * self.page_size
        rows[slots == NO_SLOT] = NO_SLOT
        return rows.astype(np.int32)

    @property
    def pages_held(self) -> int:
        """Pages that hold at least one token."""
        return int(np.count_nonzero(self._used))

    @property
    def pages_on_host(self) -> int:
        """Those of them that are on the host."""
        slots = self._segment_slots.repeat(self.segment_pages, axis=1)
        return int(np.count_nonzero(self._used[slots >= self.gpu_slots]))

    def view(self) -> PageTableView:
        """A copy that later changes do not touch."""
        page_slots = self._segment_slots.repeat(self.segment_pages, axis=1) * self.segment_pages
        page_slots += np.arange(page_slots.shape[1], dtype=np.int32) % self.segment_pages
        page_slots[self._used == 0] = NO_SLOT
        on_host = page_slots >= self.gpu_slots * self.segment_pages
        arrays = (page_slots, self._terms.copy(), self._used.copy(), on_host)
        for array in arrays:
            array.setflags(write=False)
        return PageTableView(self.page_size, *arrays)
