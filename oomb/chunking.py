"""The chunk plan: which tokens are computed together, and which pages they read and write.

Everything here is plain integers made once per step, so that the step itself never asks the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Own:
    """Tokens of one document inside a chunk: a causal square.

    Attributes:
        rows: first and last + 1 of the batch rows it holds for.
        start, stop: token range inside the chunk.
    """

    rows: tuple[int, int]
    start: int
    stop: int


@dataclass(frozen=True)
class Read:
    """Queries that continue a document begun in an earlier chunk: a rectangle over its pages.

    Attributes:
        row: batch row.
        start, stop: query range inside the chunk.
        first, last: the document's tokens so far, as logical tokens of the row's pages.
    """

    row: int
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Write:
    """Tokens whose document goes on in the next chunk, so that their K and V need pages.

    Attributes:
        row: batch row.
        start, stop: token range inside the chunk.
        first, last: where they go, as logical tokens of the row's pages.
    """

    row: int
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Chunk:
    """One unit of computation: columns [start, stop) of the batch."""

    index: int
    start: int
    stop: int
    own: tuple[Own, ...]
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True)
class ChunkPlan:
    """All chunks of a batch, and the pages that each row needs.

    Attributes:
        chunks: in order.
        pages_per_row: logical pages used by each row.
    """

    chunks: tuple[Chunk, ...]
    pages_per_row: list[int]


def plan_chunks(
    lengths: list[int], documents: list[list[int]], *, chunk_size: int, page_size: int
) -> ChunkPlan:
    """Cut a batch into chunks.

    Args:
        lengths: tokens in each row, without padding.
        documents: columns at which each row's documents start, in order, beginning with 0.
        chunk_size: tokens per chunk.
        page_size: tokens per page; a document's pages never hold another document's tokens.

    Returns:
        The plan: every token is computed in one chunk, and pages hold what later chunks read.
    """
    columns = max(lengths)
    rows = [_Row(length, starts) for length, starts in zip(lengths, documents, strict=True)]
    chunks = []
    for index, start in enumerate(range(0, columns, chunk_size)):
        stop = min(start + chunk_size, columns)
        spans = [row.spans(start, stop) for row in rows]
        reads, writes = [], []
        for number, row in enumerate(rows):
            read, write = row.advance(start, stop, spans[number], page_size)
            reads += [Read(number, *read)] if read else []
            writes += [Write(number, *write)] if write else []
        chunks.append(Chunk(index, start, stop, _merge_rows(spans), tuple(reads), tuple(writes)))
    return ChunkPlan(tuple(chunks), [-(-row.used // page_size) for row in rows])


class _Row:
    """One row while the plan walks through it."""

    def __init__(self, length: int, starts: list[int]) -> None:
        self.length = length
        self.starts = starts
        self.start_columns = set(starts)
        self.next_start = 0  # number of the first document not begun yet
        self.first = 0  # logical token at which the open document's pages begin
        self.used = 0  # logical tokens taken so far

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Documents' token ranges inside columns [start, stop), counted from `start`."""
        stop = min(stop, self.length)
        if start >= stop:
            return []
        cuts = [start]
        while self.next_start < len(self.starts) and self.starts[self.next_start] < stop:
            if self.starts[self.next_start] > start:
                cuts.append(self.starts[self.next_start])
            self.next_start += 1
        return [(a - start, b - start) for a, b in zip(cuts, [*cuts[1:], stop], strict=True)]

    def advance(
        self, start: int, stop: int, spans: list[tuple[int, int]], page_size: int
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """The row's read and write in columns [start, stop): (start, stop, first, last) or None."""
        if not spans:
            return None, None
        read = None
        continues = start > 0 and start not in self.start_columns
        if continues:
            read = (*spans[0], self.first, self.used)
        if stop >= self.length or stop in self.start_columns:
            return read, None  # the last document ends with this chunk: nobody reads it later
        if not (continues and len(spans) == 1):
            self.first = self.used = -(-self.used // page_size) * page_size
        write = (*spans[-1], self.used, self.used + spans[-1][1] - spans[-1][0])
        self.used = write[3]
        return read, write


def _merge_rows(spans: list[list[tuple[int, int]]]) -> tuple[Own, ...]:
    """Neighbouring rows cut alike share one piece."""
    pieces: list[Own] = []
    row = 0
    while row < len(spans):
        last = row + 1
        while last < len(spans) and spans[last] == spans[row]:
            last += 1
        pieces += [Own((row, last), start, stop) for start, stop in spans[row]]
        row = last
    return tuple(pieces)
