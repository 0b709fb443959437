"""Page table, pool and history: where pages lie, what they hold, and when they are free again."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oomb.cache import History, PagePool, PageTable
from oomb.cache.layout import SlotLayout
from oomb.cache.pool import LayerShape, gradient_layouts, key_layouts
from oomb.cache.table import NO_SLOT
from oomb.chunking import Read, plan_chunks
from oomb.profiling import LiveBytes

CPU = torch.device("cpu")
LAYERS = [LayerShape(2, 3, torch.float32), LayerShape(1, 4, torch.bfloat16)]


def history(pages_per_row, page_size=4, segment_pages=1, layers=LAYERS, grads=torch.float32):
    return History(
        layers,
        pages_per_row=pages_per_row,
        page_size=page_size,
        segment_pages=segment_pages,
        page_grad_dtype=grads,
        device=CPU,
    )


# -- page table -----------------------------------------------------------------------------------


def test_rows_that_grow_in_turn_interleave_their_pages():
    table = PageTable(pages_per_row=[3, 2], page_size=4, segment_pages=1)
    for row, first, last in ((0, 0, 4), (1, 0, 4), (0, 4, 9), (1, 4, 8)):
        table.hold(row, first, last)
    slots = table.view().slots
    assert sorted(slots[slots != NO_SLOT]) == [0, 1, 2, 3, 4]
    assert (np.diff(slots[0]) != 1).any()  # one row's pages are not side by side
    assert slots[1, 2] == NO_SLOT


def test_released_slots_are_used_again():
    table = PageTable(pages_per_row=[2, 2], page_size=4, segment_pages=1)
    table.hold(0, 0, 8)
    table.hold(1, 0, 4)
    freed = int(table.view().slots[0, 1])
    table.release(0, 4)
    assert table.view().slots[0].tolist()[1] == NO_SLOT
    table.hold(1, 4, 6)
    table.hold(0, 4, 5)
    slots = table.view().slots
    assert freed in (slots[0, 1], slots[1, 1])
    assert sorted(slots.flatten()) == [0, 1, 2, 3]


def test_a_straddled_page_is_held_by_both_writes_and_shrinks_back():
    """Tokens 0-2, then 3-9, over pages of 4: the first page belongs to both."""
    table = PageTable(pages_per_row=[3], page_size=4, segment_pages=2)
    table.hold(0, 0, 3)
    first = table.slot(0, 0)
    assert table.view().used.tolist() == [[3, 0, 0, 0]]
    table.hold(0, 3, 10)
    assert table.slot(0, 0) == first
    assert table.view().used.tolist() == [[4, 4, 2, 0]]
    assert table.pages_held == 3
    table.add_term(0, 0, 3)
    table.add_term(0, 0, 10)
    assert table.view().terms.tolist() == [[2, 1, 1, 0]]
    table.release(0, 3)
    assert table.view().used.tolist() == [[3, 0, 0, 0]]
    assert table.view().terms.tolist() == [[2, 0, 0, 0]]
    assert table.slot(0, 0) == first
    with pytest.raises(AssertionError, match="row 0 holds no segment 1"):
        table.slot(0, 1)
    table.release(0, 0)
    assert table.pages_held == 0


@pytest.mark.parametrize(
    ("first", "last", "pieces"),
    [
        (0, 8, [(0, 0, 8)]),
        (0, 9, [(0, 0, 8), (1, 0, 1)]),
        (7, 9, [(0, 7, 8), (1, 0, 1)]),
        (8, 16, [(1, 0, 8)]),
        (3, 30, [(0, 3, 8), (1, 0, 8), (2, 0, 8), (3, 0, 6)]),
    ],
)
def test_token_ranges_are_cut_at_segment_borders(first, last, pieces):
    table = PageTable(pages_per_row=[8], page_size=4, segment_pages=2)
    assert table.segments(first, last) == pieces


def test_views_are_copies_that_cannot_be_written():
    table = PageTable(pages_per_row=[2], page_size=4, segment_pages=1)
    table.hold(0, 0, 5)
    view = table.view()
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.page_size = 8
    for name in ("slots", "terms", "used"):
        array = getattr(view, name)
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 7
    table.add_term(0, 0, 5)
    table.release(0, 0)
    assert view.used.tolist() == [[4, 1]]
    assert view.terms.tolist() == [[0, 0]]
    assert (view.slots != NO_SLOT).all()


def test_a_table_without_pages_is_empty():
    """A batch of one chunk writes nothing."""
    table = PageTable(pages_per_row=[0, 0], page_size=4, segment_pages=2)
    assert table.num_slots == table.pages_held == 0
    assert table.view().slots.shape == (2, 0)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_plan_fits_the_slots_made_for_it(data):
    """Filled and swept as the engine does: slots suffice, are never shared, and all come back."""
    lengths = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any))
    documents = [
        [0, *sorted(data.draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=6)))]
        if length > 1
        else [0]
        for length in lengths
    ]
    page_size, segment_pages = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    plan = plan_chunks(
        lengths, documents, chunk_size=page_size * data.draw(st.integers(1, 4)), page_size=page_size
    )
    table = PageTable(
        pages_per_row=plan.pages_per_row, page_size=page_size, segment_pages=segment_pages
    )
    pages = [set() for _ in lengths]  # what each row holds, by our own count
    for chunk in plan.chunks[:-1]:
        for write in chunk.writes:
            table.hold(write.row, write.first, write.last)
            pages[write.row].update(token // page_size for token in range(write.first, write.last))
        view = table.view()
        held = [set(np.flatnonzero(row != NO_SLOT)) for row in view.slots]
        assert held == pages
        slots = view.slots[view.slots != NO_SLOT]
        assert len(np.unique(slots)) == len(slots) == table.pages_held
        assert not len(slots) or slots.max() < table.num_slots * segment_pages
    for chunk in reversed(plan.chunks):
        for read in chunk.reads:
            for segment, _, _ in table.segments(read.first, read.last):
                table.slot(read.row, segment)  # still held for every reader
            table.add_term(read.row, read.first, read.last)
        for write in chunk.writes:
            table.release(write.row, write.first)
    assert table.pages_held == 0
    view = table.view()
    assert not view.terms.any()
    assert (view.slots == NO_SLOT).all()


def test_terms_count_the_later_chunks_that_read_a_page():
    """40 tokens in chunks of 8: chunk j's pages get one term from each chunk after it."""
    plan = plan_chunks([40], [[0]], chunk_size=8, page_size=4)
    table = PageTable(pages_per_row=plan.pages_per_row, page_size=4, segment_pages=3)
    for chunk in plan.chunks:
        for write in chunk.writes:
            table.hold(write.row, write.first, write.last)
    for swept, chunk in enumerate(reversed(plan.chunks)):
        expected = [swept] * 2 * (len(plan.chunks) - max(swept, 1))
        assert table.view().terms[0, : len(expected)].tolist() == expected
        for read in chunk.reads:
            table.add_term(read.row, read.first, read.last)
        for write in chunk.writes:
            table.release(write.row, write.first)


# -- pool -----------------------------------------------------------------------------------------


def test_layout_is_slot_kv_token_head_dim():
    pool = PagePool([SlotLayout(5, 2, 3, torch.float32, page_size=5)], slots=4, device=CPU)
    per_token = 2 * 3
    for slot in range(4):
        k, v = pool.tokens(0, slot, 1, 4)
        for view in (k, v):
            assert view.shape == (1, 2, 3, 3)
            assert view.stride()[1:] == (3, per_token, 1)
        base = k.storage_offset()
        assert base == slot * 2 * 5 * per_token + 1 * per_token
        assert v.storage_offset() - base == 5 * per_token  # the same for every slot
        assert v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_views_write_to_the_pool():
    pool = PagePool(key_layouts(LAYERS, 4, page_size=2), slots=2, device=CPU, zero=True)
    k, v = pool.tokens(1, 1, 2, 3)
    k.fill_(1.0)
    v.fill_(2.0)
    again_k, again_v = pool.tokens(1, 1, 0, 4)
    assert again_k[0, 0, :, 0].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert again_v[0, 0, :, 0].tolist() == [0.0, 0.0, 2.0, 0.0]
    for layer, slot in ((0, 0), (0, 1), (1, 0)):
        assert not any(view.any() for view in pool.tokens(layer, slot, 0, 4))


@pytest.mark.parametrize(
    ("model", "asked", "stored"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float64),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_page_gradients_are_at_least_as_wide_as_the_model_unless_in_bf16(model, asked, stored):
    layouts = gradient_layouts([LayerShape(1, 4, model)], 6, page_size=2, dtype=asked)
    pool = PagePool(layouts, slots=1, device=CPU)
    assert pool.tokens(0, 0, 0, 2)[0].dtype == stored
    assert pool.bytes_per_page == 2 * 2 * 4 * stored.itemsize


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 30])
@pytest.mark.parametrize(("first", "last"), [(0, 22), (4, 21), (8, 9), (0, 16)])
def test_segments_that_no_query_sees_are_left_out(first, last, window):
    table = PageTable(pages_per_row=[8], page_size=4, segment_pages=2)
    found = table.seen(Read(0, 0, 5, first, last), window)
    expected = []
    for index, start, stop in table.segments(first, last):
        back = [last + query - 8 * index - key for query in range(5) for key in range(start, stop)]
        if window is None or min(back) < window:
            expected.append((index, start, stop))
    assert found == expected


# -- history --------------------------------------------------------------------------------------


def tokens(count, layer=LAYERS[0]):
    return [torch.randn(layer.heads, count, layer.dim).to(layer.dtype) for _ in range(2)]


@pytest.mark.parametrize("segment_pages", [1, 3, 1000])
@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_written_is_read(layer, segment_pages):
    """Two rows of 22 and 9 tokens, written in uneven pieces and read in others."""
    store = history([6, 3], segment_pages=segment_pages)
    contents = [tokens(22, LAYERS[layer]), tokens(9, LAYERS[layer])]
    for row, cuts in ((0, [0, 3, 8, 9, 22]), (1, [0, 9])):
        k, v = contents[row]
        for first, last in itertools.pairwise(cuts):
            store.table.hold(row, first, last)
            store.write(layer, row, first, k[:, first:last], v[:, first:last])
    for row, first, last in ((0, 0, 22), (0, 5, 6), (0, 4, 21), (1, 0, 9), (1, 8, 9)):
        k, v = contents[row]
        found = list(store.segments(layer, row, first, last))
        position = first
        for segment in found:
            assert segment.first == position
            assert segment.grad_k is segment.grad_v is None
            position += segment.k.shape[2]
            assert position == last or position % (4 * segment_pages) == 0
        assert position == last
        assert torch.equal(torch.cat([s.k[0] for s in found], 1), k[:, first:last])
        assert torch.equal(torch.cat([s.v[0] for s in found], 1), v[:, first:last])


def test_what_was_never_written_is_not_a_number():
    """Without this the next test could not fail: pages start as torch.empty."""
    store = history([2])
    store.table.hold(0, 0, 8)
    store.write(0, 0, 0, *tokens(5))
    (_, second) = store.segments(0, 0, 0, 8)
    assert second.k[:, :, :1].isfinite().all()
    assert second.k[:, :, 1:].isnan().all()
    assert second.v[:, :, 1:].isnan().all()


@pytest.mark.parametrize("segment_pages", [1, 3, 1000])
def test_nothing_unwritten_is_ever_read(segment_pages):
    """Read exactly what a plan reads, in fill order: no unwritten tail shows."""
    lengths, documents = [37, 20], [[0, 5, 18], [0]]
    plan = plan_chunks(lengths, documents, chunk_size=8, page_size=4)
    store = history(plan.pages_per_row, segment_pages=segment_pages)
    seen = 0
    for chunk in plan.chunks:
        for read in chunk.reads:
            for segment in store.segments(0, read.row, read.first, read.last):
                assert segment.k.isfinite().all()
                assert segment.v.isfinite().all()
                seen += segment.k.shape[2]
        for write in chunk.writes:
            store.table.hold(write.row, write.first, write.last)
            store.write(0, write.row, write.first, *tokens(write.last - write.first))
    assert seen == sum(read.last - read.first for chunk in plan.chunks for read in chunk.reads) > 0


@pytest.mark.parametrize("segment_pages", [1, 3, 1000])
def test_gradients_start_at_zero_and_gather_in_place(segment_pages):
    store = history([6], segment_pages=segment_pages)
    store.table.hold(0, 0, 22)
    for layer in range(2):
        store.write(layer, 0, 0, *tokens(22, LAYERS[layer]))
    store.open_gradients()
    for first, last in ((0, 22), (4, 9)):
        for segment in store.segments(0, 0, first, last, gradients=True):
            segment.grad_k.add_(1.0)
            segment.grad_v.add_(2.0)
    found = list(store.segments(0, 0, 0, 22, gradients=True))
    expected = torch.ones(2, 22, 3)
    expected[:, 4:9] += 1.0
    assert torch.equal(torch.cat([s.grad_k[0] for s in found], 1), expected)
    assert torch.equal(torch.cat([s.grad_v[0] for s in found], 1), 2 * expected)
    for segment in store.segments(1, 0, 0, 22, gradients=True):  # another layer has its own
        assert segment.grad_k.dtype == torch.float32
        assert not segment.grad_k.any()
        assert not segment.grad_v.any()


@pytest.mark.parametrize("segment_pages", [1, 3])
def test_bytes_alive_are_those_of_the_pages_held(segment_pages):
    page = 4 * (2 * 2 * 3 * 4 + 2 * 1 * 4 * 2)  # tokens x (fp32 layer + bf16 layer), K and V
    page_gradient = 4 * (2 * 2 * 3 + 2 * 1 * 4) * 4
    with LiveBytes() as live:
        store = history([6, 3], segment_pages=segment_pages)
        assert store.bytes_alive() == {"kv_pages": 0, "page_gradients": 0}
        for row, first, last, pages in ((0, 0, 3, 1), (0, 3, 22, 6), (1, 0, 9, 9)):
            store.table.hold(row, first, last)
            assert store.bytes_alive() == {"kv_pages": pages * page, "page_gradients": 0}
        # every page of every row is held: whole segments, no more, were allocated
        assert live.current_by["kv_pages"] == store.bytes_alive()["kv_pages"]
        store.open_gradients()
        assert live.current_by["page_gradients"] == store.bytes_alive()["page_gradients"]
    for row, first, pages in ((1, 0, 6), (0, 3, 1), (0, 0, 0)):
        store.table.release(row, first)
        assert store.bytes_alive() == {
            "kv_pages": pages * page,
            "page_gradients": pages * page_gradient,
        }
