"""Live bytes: every storage counted once, from its making until it is freed."""

import threading
import weakref

import numpy as np
import pytest
import torch
from helpers import tiny_model
from torch.utils.checkpoint import checkpoint

import oomb
from oomb.profiling import LiveBytes, category

KB = 256  # fp32 numbers in a kilobyte
IDS = torch.arange(3, 23)[None]
SIZES = {"chunk_size": 8, "page_size": 4}


def test_bytes_of_allocations_and_frees():
    before = torch.ones(KB)
    with LiveBytes() as live:
        a = torch.zeros(4 * KB)
        assert live.current == 4096
        b = torch.ones(2 * KB, dtype=torch.float64)
        assert live.current == 8192
        c = a + a
        assert live.current == live.peak == 12288
        del a, c
        assert live.current == 4096
        before.add_(1.0)  # no allocation, and an input is not ours
        d = before * 2.0
        assert live.current == 4096 + 1024
        del d
        assert live.peak == 12288
        live.reset_peak()
        assert live.peak == live.current == 4096
    del b
    assert live.current == 0  # freed after the block counts as freed


def test_views_and_in_place_operators_share_their_storage():
    with LiveBytes() as live:
        a = torch.zeros(4 * KB)
        views = [a[:KB], a.view(4, KB).t(), a.detach(), a[None].expand(8, -1), a[::2]]
        a.add_(1.0).mul_(2.0)
        views[0].fill_(3.0)
        assert live.current == live.peak == 4096
        del a
        assert live.current == 4096  # the views hold it
        part = views[0]
        views.clear()
        assert live.current == 4096
        del part
    assert live.current == 0


def test_a_copy_is_counted_where_a_view_is_not():
    with LiveBytes() as live:
        a = torch.zeros(8, KB)
        assert a.t().contiguous().shape == (KB, 8)
        assert (live.current, live.peak) == (8192, 16384)
        a.t().reshape(8, KB)
        assert live.peak == 16384
        a.to(torch.float64)
        assert live.peak == 8192 + 16384


def test_tensors_held_by_the_graph_alone_are_alive():
    w = torch.randn(KB, requires_grad=True)
    with LiveBytes() as live:
        y = (w * 2.0).exp().sum()  # exp keeps its output, the product is gone
        assert live.current == 1024 + 4
        y.backward()
        assert live.current == 1024 + 4  # the graph's tensor is freed, the gradient is alive
        w.grad = None
    assert live.current == 4


@pytest.mark.parametrize(("run", "per_block"), [("plain", 2), ("checkpointed", 1)])
def test_checkpointed_tensors_are_dropped_and_made_again(run, per_block):
    """A block keeps two tensors (exp its output, cos its input); checkpointed, only its input."""

    def block(x):
        return (x.exp().sin() * 2.0).cos()

    w = torch.randn(64 * KB, requires_grad=True)
    held, peaks = {}, {}
    for blocks in (4, 8):
        w.grad = None
        with LiveBytes() as live:
            y = w * 1.0
            for _ in range(blocks):
                y = block(y) if run == "plain" else checkpoint(block, y, use_reentrant=False)
            held[blocks] = live.current / w.nbytes
            y.sum().backward()
            peaks[blocks] = live.peak / w.nbytes
    assert held == {4: 4 * per_block + 1, 8: 8 * per_block + 1}  # and the result
    assert peaks[8] - peaks[4] == 4 * per_block
    assert peaks[4] > held[4] + 1  # backward's own tensors, those made again among them


def test_what_backward_allocates_is_seen():
    """Also from inside a custom function, on whatever thread it runs."""
    during = {}

    class Scratch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            before = live.current
            scratch = torch.zeros(100 * KB)
            during["more"] = live.current - before
            return grad + scratch.sum()

    x = torch.zeros(KB, requires_grad=True)
    with LiveBytes() as live:
        loss = Scratch.apply(x).sum()
        live.reset_peak()
        start = live.current
        loss.backward()
    assert during["more"] == 100 * 1024
    assert 0 <= live.peak - start - 100 * 1024 <= 3 * 1024
    assert live.current == 1024 + 4  # the gradient and the loss


def test_categories_are_counted_apart_until_freed():
    with LiveBytes() as live:
        with category("kv_pages"):
            pages = torch.zeros(4 * KB)
            with category("page_gradients"):
                gradients = torch.zeros(2 * KB)
            more = torch.zeros(KB)
        rest = pages + 1.0
        view = pages[:3]
        assert dict(live.current_by) == {"kv_pages": 5120, "page_gradients": 2048, "other": 4096}
        del pages, more, rest
        assert live.current_by["kv_pages"] == 4096  # by the view
        del view, gradients
    assert set(live.current_by.values()) == {0}
    assert dict(live.peak_by) == {"kv_pages": 5120, "page_gradients": 2048, "other": 4096}


def test_a_category_ends_even_where_its_body_raises():
    with LiveBytes() as live:
        with pytest.raises(KeyError), category("kv_pages"):
            raise KeyError
        kept = torch.zeros(KB)
    assert live.current_by == {"other": kept.nbytes}


def test_threads_have_their_own_category():
    """Whichever order their blocks end in."""
    inside, done = threading.Event(), threading.Event()

    def other_thread():
        with category("page_gradients"):
            inside.set()
            assert done.wait(10)

    thread = threading.Thread(target=other_thread)
    with category("kv_pages"):
        thread.start()
        assert inside.wait(10)
    with LiveBytes() as live:
        kept = torch.zeros(KB)
        done.set()
        thread.join()
        more = torch.zeros(KB)
    assert live.current_by == {"other": kept.nbytes + more.nbytes}


def test_an_address_used_again_is_counted_again():
    """The allocator hands freed storages out again at once."""
    with LiveBytes() as live:
        addresses = set()
        for _ in range(50):
            a = torch.zeros(KB)
            assert live.current == 1024
            addresses.add(a.data_ptr())
            del a
    assert len(addresses) < 50  # it did happen
    assert (live.current, live.peak) == (0, 1024)


def test_tensors_made_from_data_are_counted():
    """torch.tensor makes them before dispatch; their first operator is a lift."""
    with LiveBytes() as live:
        kept = torch.tensor([1.0] * KB)
        assert live.current == 1024
        shared = torch.from_numpy(np.zeros(KB, np.float32)) + kept
        assert live.current == 2048  # memory of numpy's is not torch's
        del kept
    assert live.current == shared.nbytes


def test_storages_that_grow_and_shrink_are_counted_at_their_size():
    with LiveBytes() as live:
        a = torch.empty(0)
        a.resize_(4 * KB)
        assert live.current == 4096
        torch.cat([torch.zeros(4 * KB), torch.zeros(4 * KB)], out=(b := torch.empty(0)))
        assert live.current == 4096 + b.nbytes == 4096 + 8192
        a.untyped_storage().resize_(0)  # not an operator: seen with the next one
        a.detach()
        assert live.current == 8192
        del a, b
    assert live.current == 0


def test_tensors_without_ordinary_memory_are_passed_over():
    embedding = torch.nn.Embedding(5, KB, sparse=True)
    with LiveBytes() as live:
        embedding(torch.tensor([1, 2])).sum().backward()
        assert embedding.weight.grad.is_sparse
        live.reset_peak()
        torch.zeros(1 << 40, device="meta")
    assert live.peak < 1 << 20


def test_one_inside_another_counts_the_same():
    with LiveBytes() as outer:
        a = torch.zeros(KB)
        with LiveBytes() as inner:
            b = a + torch.zeros(KB)
            assert (inner.current, outer.current) == (1024, 2048)
            del a
            assert (inner.current, outer.current) == (1024, 1024)
        del b
    assert (inner.current, outer.current) == (0, 0)
    assert (inner.peak, outer.peak) == (2048, 3072)


def test_counting_keeps_nothing_alive():
    with LiveBytes() as live:
        a = torch.zeros(KB)
        reference = weakref.ref(a)
        del a
        assert reference() is None
    assert live.current == 0


def test_pages_and_gradients_of_a_step_have_their_own_categories():
    """20 tokens of 2 layers, 2 heads of 8 numbers, K and V in fp32: chunks 0 and 1 need pages."""
    model = tiny_model("qwen2", torch.float32)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine:
        engine.step(IDS)  # gradients exist from now on
        with LiveBytes() as live:
            engine.step(IDS)
    pages = 16 * 2 * 2 * 2 * 8 * 4
    assert live.peak_by["kv_pages"] == live.peak_by["page_gradients"] == pages
    assert live.current_by["kv_pages"] == live.current_by["page_gradients"] == 0
