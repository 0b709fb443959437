"""The chunk plan and the batch: who is computed with whom, who reads whom, who predicts what."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomb.batch import IGNORED, check_batch
from oomb.chunking import Own, Read, Write, plan_chunks
from oomb.columns import Columns

CPU = torch.device("cpu")


def pieces(lengths, documents, chunk_size, page_size):
    plan = plan_chunks(lengths, documents, chunk_size=chunk_size, page_size=page_size)
    return [(c.own, c.reads, c.writes) for c in plan.chunks], plan.pages_per_row


# -- by hand --------------------------------------------------------------------------------------


def test_one_row_that_chunks_do_not_divide():
    """10 tokens in chunks of 4: the last chunk is partial, and nobody needs its pages."""
    own = [(Own((0, 1), 0, n),) for n in (4, 4, 2)]
    assert pieces([10], [[0]], 4, 2) == (
        [
            (own[0], (), (Write(0, 0, 4, 0, 4),)),
            (own[1], (Read(0, 0, 4, 0, 4),), (Write(0, 0, 4, 4, 8),)),
            (own[2], (Read(0, 0, 2, 0, 8),), ()),
        ],
        [4],
    )


def test_one_chunk_needs_no_pages():
    assert pieces([4], [[0]], 4, 2) == ([((Own((0, 1), 0, 4),), (), ())], [0])
    assert pieces([1], [[0]], 4, 2) == ([((Own((0, 1), 0, 1),), (), ())], [0])


def test_rows_cut_alike_share_a_piece_and_padding_is_in_none():
    """Rows of 4, 4 and 2 tokens, one without any, and one of 3, in a chunk of 4."""
    (found, pages) = pieces([4, 4, 2, 0, 3], [[0]] * 5, 4, 2)
    assert found == [((Own((0, 2), 0, 4), Own((2, 3), 0, 2), Own((4, 5), 0, 3)), (), ())]
    assert pages == [0] * 5


def test_a_document_inside_a_chunk_needs_no_pages():
    """Documents at 0, 3 and 6 of 10 tokens, chunks of 8: only the last one crosses a border."""
    assert pieces([10], [[0, 3, 6]], 8, 4) == (
        [
            (
                (Own((0, 1), 0, 3), Own((0, 1), 3, 6), Own((0, 1), 6, 8)),
                (),
                (Write(0, 6, 8, 0, 2),),
            ),
            ((Own((0, 1), 0, 2),), (Read(0, 0, 2, 0, 2),), ()),
        ],
        [1],
    )


def test_the_next_document_starts_on_a_new_page():
    """Documents of 6 and 14 tokens in chunks of 4, pages of 4: the second starts at page 1."""
    found, pages = pieces([20], [[0, 6]], 4, 4)
    assert [writes for _, _, writes in found] == [
        (Write(0, 0, 4, 0, 4),),
        (Write(0, 2, 4, 4, 6),),  # its first two tokens, in a page of their own
        (Write(0, 0, 4, 6, 10),),
        (Write(0, 0, 4, 10, 14),),
        (),
    ]
    assert [reads for _, reads, _ in found] == [
        (),
        (Read(0, 0, 2, 0, 4),),
        (Read(0, 0, 4, 4, 6),),
        (Read(0, 0, 4, 4, 10),),
        (Read(0, 0, 4, 4, 14),),
    ]
    assert pages == [4]


def test_a_document_that_ends_with_a_chunk_is_not_written_again():
    found, pages = pieces([12], [[0, 8]], 4, 2)
    assert [(reads, writes) for _, reads, writes in found] == [
        ((), (Write(0, 0, 4, 0, 4),)),
        ((Read(0, 0, 4, 0, 4),), ()),
        ((), ()),
    ]
    assert pages == [2]


# -- any plan -------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """Lengths with padding and empty rows, documents of any length, sizes that divide nothing."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    documents = [
        [0, *sorted(draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=8)))]
        if length > 1
        else [0]
        for length in lengths
    ]
    page_size = draw(st.integers(1, 6))
    return lengths, documents, page_size * draw(st.integers(1, 5)), page_size


def document_of(lengths, documents):
    """(row, column) of every real token -> (row, first column of its document)."""
    return {
        (row, column): (row, max(s for s in starts if s <= column))
        for row, (length, starts) in enumerate(zip(lengths, documents, strict=True))
        for column in range(length)
    }


@settings(max_examples=150, deadline=None)
@given(batches())
def test_every_pair_of_a_document_is_covered_exactly_once(batch):
    """Replay the plan with token names for K and V: no page, no attention, only who meets whom."""
    lengths, documents, chunk_size, page_size = batch
    plan = plan_chunks(lengths, documents, chunk_size=chunk_size, page_size=page_size)
    document = document_of(lengths, documents)
    memory = {}  # (row, logical token) -> the token stored there
    owned, pairs, stored = Counter(), Counter(), Counter()
    assert [chunk.index for chunk in plan.chunks] == list(range(len(plan.chunks)))
    edges = [0, *(chunk.stop for chunk in plan.chunks)]
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == list(itertools.pairwise(edges))
    assert edges[-1] == max(lengths)
    for chunk in plan.chunks:
        assert 0 < chunk.stop - chunk.start <= chunk_size
        for own in chunk.own:
            columns = range(chunk.start + own.start, chunk.start + own.stop)
            for row in range(*own.rows):
                owned.update((row, column) for column in columns)
                pairs.update(((row, q), (row, k)) for q in columns for k in columns if k <= q)
        for read in chunk.reads:
            for q in range(chunk.start + read.start, chunk.start + read.stop):
                pairs.update(
                    ((read.row, q), memory[read.row, token])
                    for token in range(read.first, read.last)
                )
        for write in chunk.writes:
            assert write.last - write.first == write.stop - write.start
            for number in range(write.first, write.last):
                token = (write.row, chunk.start + write.start + number - write.first)
                assert (write.row, number) not in memory  # nothing is overwritten
                memory[write.row, number] = token
                stored[token] += 1
    assert owned == Counter(document.keys())
    expected = Counter(
        ((row, q), (row, k))
        for row, q in document
        for k in range(q + 1)
        if document[row, k] == document[row, q]
    )
    assert pairs == expected
    # exactly the tokens that a later chunk reads are stored, once each
    needed = {k for (q, k) in expected if q[1] // chunk_size != k[1] // chunk_size}
    assert stored == Counter(needed)
    # a page holds one document, and every row's pages are counted
    holders = {}
    for (row, number), token in memory.items():
        holders.setdefault((row, number // page_size), set()).add(document[token])
    assert all(len(found) == 1 for found in holders.values())
    for row, count in enumerate(plan.pages_per_row):
        assert {page for r, page in holders if r == row} == set(range(count))


@settings(max_examples=50, deadline=None)
@given(batches())
def test_a_chunk_reads_and_writes_each_row_once(batch):
    """What lets the sweep release a chunk's pages: its writes are the last tokens of their rows."""
    lengths, documents, chunk_size, page_size = batch
    plan = plan_chunks(lengths, documents, chunk_size=chunk_size, page_size=page_size)
    used = [0] * len(lengths)
    for chunk in plan.chunks:
        for moves in (chunk.reads, chunk.writes):
            assert len({move.row for move in moves}) == len(moves)
        for read in chunk.reads:
            assert read.first < read.last == used[read.row]
        for write in chunk.writes:
            assert used[write.row] <= write.first < used[write.row] + page_size
            used[write.row] = write.last
    assert not plan.chunks[-1].writes


# -- the batch ------------------------------------------------------------------------------------


def checked(ids, **arguments):
    return check_batch(ids, vocab_size=97, device=CPU, max_positions=None, **arguments)


def in_chunks(batch, size, columns):
    """Ids, positions and targets, cut and joined again."""
    edges = [*range(0, columns, size), columns]
    cut = Columns(batch, CPU)
    found = [(*cut.inputs(a, b), cut.targets(a, b)) for a, b in itertools.pairwise(edges)]
    return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_inputs_and_targets_equal_a_plain_walk_over_tokens(data):
    lengths, documents, _, _ = data.draw(batches())
    rows, columns = len(lengths), max(lengths)
    ids = torch.randint(0, 97, (rows, columns + data.draw(st.integers(0, 2))))
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    names = torch.zeros_like(ids)
    for row, starts in enumerate(documents):
        for start in starts[1:]:
            names[row, start:] += 1
    arguments = {"attention_mask": mask, "document_ids": names}
    labels = ids
    if data.draw(st.booleans()):
        labels = torch.randint(0, 97, ids.shape).masked_fill(torch.rand(ids.shape) < 0.3, IGNORED)
        labels.masked_fill_(~mask, IGNORED)
        arguments["labels"] = labels
    restart = data.draw(st.booleans())
    document = document_of(lengths, documents)
    positions = torch.zeros_like(ids)
    for (row, column), (_, first) in document.items():
        positions[row, column] = column - first
    if restart:  # documents told apart by positions alone
        del arguments["document_ids"]
        arguments["position_ids"] = positions
    batch = checked(ids, **arguments)
    assert batch.lengths == lengths
    assert batch.documents == documents

    targets = torch.full((rows, columns), IGNORED)
    for row, column in document:
        if document.get((row, column + 1)) == document[row, column]:
            targets[row, column] = labels[row, column + 1]
    size = data.draw(st.integers(1, columns + 2))
    found_ids, found_positions, found_targets = in_chunks(batch, size, columns)
    assert torch.equal(found_targets, targets)
    assert torch.equal(found_ids, ids[:, :columns])
    real = mask[:, :columns]
    assert torch.equal(found_positions[real], positions[:, :columns][real])
    assert batch.num_label_tokens == int((targets != IGNORED).sum()) == batch.denominator
    for x in (found_ids, found_positions, found_targets):
        assert x.dtype == torch.int64
    cut = Columns(batch, CPU)
    assert torch.equal(torch.cat([cut.real_tokens(a, a + 1) for a in range(columns)], 1), real)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_chunks_last_token_predicts_the_next_chunks_first(size):
    ids = torch.arange(1, 11)[None]
    batch = checked(ids)
    *_, targets = in_chunks(batch, size, 10)
    assert targets.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9, 10, IGNORED]]
    assert batch.num_label_tokens == 9
    assert Columns(batch, CPU).real_tokens(0, 10) is None


def test_a_documents_first_token_is_predicted_by_nobody():
    """Its label does not count, wherever the chunk border lies."""
    ids = torch.arange(1, 9)[None]
    batch = checked(ids, document_ids=torch.tensor([[5, 5, 5, 2, 2, 9, 9, 9]]))
    assert batch.documents == [[0, 3, 5]]
    expected = [[2, 3, IGNORED, 5, IGNORED, 7, 8, IGNORED]]
    for size in range(1, 9):
        assert in_chunks(batch, size, 8)[2].tolist() == expected
    assert in_chunks(batch, 3, 8)[1].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.num_label_tokens == 5


@pytest.mark.parametrize(
    ("labels", "count"),
    [([[-100] * 5], 0), ([[7, -100, -100, -100, -100]], 0), ([[-100, 4, -100, 5, 6]], 3)],
)
def test_ignored_labels_are_not_counted(labels, count):
    batch = checked(torch.ones(1, 5, dtype=torch.int64), labels=torch.tensor(labels))
    assert batch.num_label_tokens == batch.denominator == count
    targets = in_chunks(batch, 2, 5)[2]
    assert int((targets != IGNORED).sum()) == count


def test_one_row_of_positions_serves_all_rows():
    """[1, N] as transformers makes them; a jump ahead starts a document as well."""
    ids = torch.randint(0, 97, (2, 7))
    batch = checked(ids, position_ids=torch.tensor([[3, 4, 5, 0, 1, 8, 9]]))
    assert batch.documents == [[0, 3, 5]] * 2
    assert in_chunks(batch, 3, 7)[1].tolist() == [[3, 4, 5, 0, 1, 8, 9]] * 2


@pytest.mark.parametrize("items", [7, 7.0, torch.tensor(7), torch.tensor([7.0])], ids=str)
def test_the_callers_denominator_is_used_but_labels_are_counted(items):
    batch = checked(torch.ones(2, 5, dtype=torch.int64), num_items_in_batch=items)
    assert batch.denominator == 7.0
    assert batch.num_label_tokens == 8


def test_padding_has_position_zero():
    """Counting on over padding could leave a learned position table."""
    mask = torch.tensor([[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]])
    ids, documents = torch.ones_like(mask), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]).expand(2, -1)
    batch = checked(ids, attention_mask=mask, document_ids=documents)
    for size in range(1, 9):
        found = in_chunks(batch, size, 8)[1]
        assert found.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8], ids=str)
def test_every_signed_integer_dtype_means_the_same(dtype):
    ids = torch.randint(0, 97, (2, 9))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, IGNORED)
    positions = (torch.arange(9) % 5)[None]
    assert_same_batch(
        checked(ids.to(dtype), labels=labels.to(dtype), position_ids=positions.to(dtype)),
        checked(ids, labels=labels, position_ids=positions),
    )


def test_unsigned_bytes_mean_the_same():
    """-100 is 156 and 0 follows 255 in eight bits without a sign, but not for us."""
    ids = torch.tensor([[156, 7, 156, 8] * 128])
    positions = (torch.arange(512) % 256)[None]
    arguments = {"vocab_size": 256, "device": CPU, "max_positions": None}
    batch = check_batch(ids.byte(), ids.byte(), None, positions.byte(), **arguments)
    assert batch.documents == [[0, 256]]
    assert batch.num_label_tokens == 510
    assert_same_batch(batch, check_batch(ids, ids, None, positions, **arguments))


def assert_same_batch(batch, expected):
    assert batch.documents == expected.documents
    assert batch.num_label_tokens == expected.num_label_tokens
    columns = expected.input_ids.shape[1]
    for a, b in zip(in_chunks(batch, 4, columns), in_chunks(expected, 4, columns), strict=True):
        assert torch.equal(a, b)
