"""Attention backends, their merge and one layer's fill and sweep, against a formula in fp64.

The formula here is written apart from the backends: heads repeated, a boolean matrix of what each
query sees, softmax and autograd.
"""

import ast
import itertools
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import (
    BATCHES,
    SCALE,
    chunked_layer,
    error,
    layer_tensors,
    truth,
    visible,
    whole_layer,
)

import oomb.attention.impl
from oomb.attention import ChunkAttention, LayerCall, Mask, attend, choose_backend
from oomb.attention.impl import library, reference
from oomb.attention.merge import merge
from oomb.cache import History, PagePool
from oomb.cache.layout import SlotLayout
from oomb.cache.pool import LayerShape
from oomb.chunking import plan_chunks

CPU = torch.device("cpu")
BACKENDS = {"reference": reference.ReferenceBackend, "library": library.CpuFlashBackend}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}
NAMES = ("out", "lse", "dq", "dk", "dv")
LAYER_NAMES = ("out", "dq", "dk", "dv")
HEADS = [(4, 4), (4, 2), (6, 1)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]()


def tensors(queries, keys, heads=(4, 2), dim=8, rows=2, dtype=torch.float64):
    """q, k, v and grad_out in `dtype`, and the same numbers in fp64."""
    shapes = [(rows, heads[0], queries, dim), *[(rows, heads[1], keys, dim)] * 2]
    low = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in (*shapes, shapes[0])]
    return low, [x.double() for x in low]


def assert_all_close(results, expected, limit):
    for name, a, b in zip(NAMES, results, expected, strict=True):
        assert error(a, b) < limit, name


# -- one part -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(n, n, True) for n in (1, 2, 63, 100, 111)]
    + [(1, 111, False), (111, 1, False), (63, 100, False), (100, 63, False), (2, 2, False)],
)
def test_a_part_alone(backend, queries, keys, causal, heads, dtype):
    dim = 5 if queries == 63 else 8
    (q, k, v, grad), wide = tensors(queries, keys, heads, dim, dtype=dtype)
    mask = Mask(causal=causal)
    out, lse = backend.forward(q, k, v, SCALE, mask)
    grads = backend.backward(grad, q, k, v, out, lse, SCALE, mask)
    assert lse.dtype == dtype
    expected = truth(*wide, visible(queries, keys, mask))
    assert_all_close((out, lse, *grads), expected, TOLERANCE[dtype])


def merged(backend, q, k, v, grad, parts):
    """out, lse, dq, dk, dv of parts [(start, stop, mask)] of the keys, in the order given."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=wide)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float64)
    for start, stop, mask in parts:
        part = backend.forward(q, k[:, :, start:stop], v[:, :, start:stop], SCALE, mask)
        out, lse = merge((out, lse), part, wide)
    kept, lse = out.to(q.dtype), lse.to(wide)
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    for start, stop, mask in parts:
        here = (k[:, :, start:stop], v[:, :, start:stop])
        terms = backend.backward(grad, q, *here, kept, lse, SCALE, mask)
        grad_q += terms[0]
        grad_k[:, :, start:stop] += terms[1]
        grad_v[:, :, start:stop] += terms[2]
    return out, lse, grad_q, grad_k, grad_v


def history_and_own(queries, cuts, window=None):
    """Parts of history cut at `cuts`, then the causal square of the queries themselves."""
    past = cuts[-1]
    parts = [(a, b, Mask(offset=past - a, window=window)) for a, b in itertools.pairwise(cuts)]
    return [*parts, (past, past + queries, Mask(causal=True, window=window))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("queries", [1, 63, 111])
def test_parts_given_the_global_out_and_lse_add_up(backend, queries, heads, dtype):
    cuts = [0, 1, 64, 100]
    low, wide = tensors(queries, 100 + queries, heads, dtype=dtype)
    parts = history_and_own(queries, cuts)
    seen = visible(queries, 100 + queries, Mask(offset=100, causal=True))
    expected = truth(*wide, seen)
    for order in (parts, parts[::-1], [parts[i] for i in (2, 0, 3, 1)]):
        assert_all_close(merged(backend, *low, order), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [63, 100, 111])
def test_low_precision_is_as_good_as_an_independent_run(backend, queries, dtype):
    low, wide = tensors(queries, 137 + queries, (4, 2), 16, dtype=dtype)
    seen = visible(queries, 137 + queries, Mask(offset=137, causal=True))
    expected = truth(*wide, seen)
    independent = truth(*low, seen)
    results = merged(backend, *low, history_and_own(queries, [0, 48, 96, 137]))
    for name, a, b, c in zip(NAMES, results, independent, expected, strict=True):
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_strided_views_give_what_contiguous_tensors_give(backend, dtype):
    """K and V as the pool lays them out, q as a model's projection, grad_out of a sum."""
    (q, k, v, _), _ = tensors(37, 50, rows=1, dtype=dtype)
    pool = PagePool([SlotLayout(64, 2, 8, dtype, page_size=64)], slots=2, device=CPU)
    views = pool.tokens(0, 1, 7, 57)
    for view, content in zip(views, (k, v), strict=True):
        view.copy_(content)
        assert not view.is_contiguous()
    strided_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    ones = torch.ones((), dtype=dtype).expand(q.shape)
    assert not strided_q.is_contiguous() and not ones.is_contiguous()

    def run(q, k, v, grad):
        out, lse = backend.forward(q, k, v, SCALE, Mask())
        strided_out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out, lse, *backend.backward(grad, q, k, v, strided_out, lse, SCALE, Mask())

    limit = 1e-13 if dtype == torch.float64 else 1e-2
    assert_all_close(run(strided_q, *views, ones), run(q, k, v, ones.contiguous()), limit)


@pytest.mark.parametrize("which", range(5), ids=["grad_out", "q", "k", "v", "out"])
def test_a_head_dim_that_is_not_adjacent_is_read_right(backend, which):
    """Transposed in memory, as a model's own projection may leave it."""
    (q, k, v, grad), _ = tensors(9, 9)
    mask = Mask(causal=True)
    expected = backend.forward(q, k, v, SCALE, mask)
    expected += backend.backward(grad, q, k, v, *expected, SCALE, mask)
    inputs = [grad, q, k, v, expected[0]]
    inputs[which] = inputs[which].transpose(-1, -2).contiguous().transpose(-1, -2)
    assert inputs[which].stride(-1) == 9
    grad, q, k, v, out = inputs
    results = backend.forward(q, k, v, SCALE, mask)
    results += backend.backward(grad, q, k, v, out, results[1], SCALE, mask)
    assert_all_close(results, expected, 1e-14)


def test_two_threads_sharing_keys_do_not_race():
    """Query heads that share keys add to the same gradients."""
    (q, k, v, grad), wide = tensors(33, 33, (16, 1), rows=1, dtype=torch.float32)
    expected = truth(*wide, visible(33, 33, Mask(causal=True)))
    backend, mask, threads = library.CpuFlashBackend(), Mask(causal=True), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            out, lse = backend.forward(q, k, v, SCALE, mask)
            grads = backend.backward(grad, q, k, v, out, lse, SCALE, mask)
            assert_all_close((out, lse, *grads), expected, TOLERANCE[torch.float32])
    finally:
        torch.set_num_threads(threads)


# -- masks and windows ----------------------------------------------------------------------------


def test_mask_shortcuts_agree_with_every_pair():
    for offset, queries, keys, window, causal in itertools.product(
        range(7), range(1, 5), range(1, 6), (None, 1, 2, 3, 5, 8), (False, True)
    ):
        mask = Mask(offset, causal, window)
        seen = visible(queries, keys, mask)
        assert mask.hides_any(queries, keys) == (not seen.all()), mask


@pytest.mark.parametrize(
    ("distance", "window"),
    [(d, w) for d in (0, 1, 5, 64) for w in (d - 1, d, d + 1) if w > 0],
)
def test_a_window_counts_the_query_itself(distance, window):
    """A window of w sees w tokens, the query's own included: a key w back is out of it."""
    q = k = v = torch.ones(1, 1, 1, 4, dtype=torch.float64)
    mask = Mask(offset=distance, window=window)
    out, lse = reference.ReferenceBackend().forward(q, k, v, SCALE, mask)
    if window == distance + 1:
        assert torch.equal(out, v)
        assert lse.item() == pytest.approx(4 * SCALE)
    else:
        assert torch.equal(out, torch.zeros_like(v))
        assert lse.item() == float("-inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("window", [1, 2, 7, 30, 31, 39, 40, 41, 69, 70, 71])
def test_windows_over_history_and_own_chunk(window, dtype):
    """30 queries behind 40 keys in uneven parts; with small windows some rows see none of them."""
    low, wide = tensors(30, 70, dtype=dtype)
    parts = history_and_own(30, [0, 1, 9, 32, 40], window)
    expected = truth(*wide, visible(30, 70, Mask(offset=40, causal=True, window=window)))
    for order in (parts, parts[::-1]):
        results = merged(reference.ReferenceBackend(), *low, order)
        assert_all_close(results, expected, TOLERANCE[dtype])


def test_rows_that_see_nothing_in_a_part_take_no_gradient_from_it():
    backend, mask = reference.ReferenceBackend(), Mask(offset=3, window=5)
    (q, k, v, grad), _ = tensors(6, 3)
    seen = visible(6, 3, mask).any(1)
    assert seen.tolist() == [True, True, True, True, False, False]  # the case has both kinds
    out, lse = backend.forward(q, k, v, SCALE, mask)
    assert torch.equal(out[:, :, ~seen], torch.zeros_like(out[:, :, ~seen]))
    assert (lse[:, :, ~seen] == float("-inf")).all()
    assert lse[:, :, seen].isfinite().all()
    for given_lse in (lse, lse.clamp(min=-1.0)):  # blind rows have another part, or none at all
        grad_q, grad_k, grad_v = backend.backward(grad, q, k, v, out, given_lse, SCALE, mask)
        assert torch.equal(grad_q[:, :, ~seen], torch.zeros_like(grad_q[:, :, ~seen]))
        for gradient in (grad_q, grad_k, grad_v):
            assert gradient.isfinite().all()
            assert gradient.abs().max() > 0
    # what blind rows carry cannot matter
    other = torch.where(seen[:, None], grad, grad + 100.0)
    again = backend.backward(other, q, k, v, out, lse.clamp(min=-1.0), SCALE, mask)
    assert torch.equal(again[1], grad_k)
    assert torch.equal(again[2], grad_v)


# -- merge ----------------------------------------------------------------------------------------


def merge_all(parts, shape, dtype):
    out = torch.zeros(*shape, 3, dtype=dtype)
    lse = torch.full(shape, float("-inf"), dtype=dtype)
    for part in parts:
        out, lse = merge((out, lse), part, dtype)
    return out, lse


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e2, 1e4, 1e30])
def test_merge_in_any_order_at_any_size_of_logits(spread):
    shape = (1, 2, 3)
    outs = [torch.randn(*shape, 3, dtype=torch.float64) for _ in range(4)]
    lses = [torch.randn(shape, dtype=torch.float64) * spread for _ in range(4)]
    lses[1][0, 0] = float("-inf")  # some queries see nothing of this part,
    lses[2][:] = float("-inf")  # none sees anything of that one
    outs[2][:] = 0.0
    weights = torch.stack(lses).softmax(0)
    expected = (torch.stack(outs) * weights[..., None]).sum(0), torch.stack(lses).logsumexp(0)
    for order in itertools.permutations(range(4)):
        results = merge_all([(outs[i], lses[i]) for i in order], shape, torch.float64)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_merging_only_parts_that_hold_nothing_leaves_the_identity():
    shape = (1, 2, 3)
    nothing = (torch.zeros(*shape, 3), torch.full(shape, float("-inf")))
    out, lse = merge_all([nothing] * 3, shape, torch.float32)
    assert torch.equal(out, nothing[0])
    assert torch.equal(lse.float(), nothing[1])
    some = (torch.randn(*shape, 3), torch.randn(shape))
    out, lse = merge((out, lse), some, torch.float32)
    assert torch.equal(out, some[0])
    assert torch.equal(lse.float(), some[1])


# -- a layer, filled and swept --------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [(8, 4, 1), (8, 2, 3), (6, 3, 100), (2, 1, 2), (64, 4, 1)], ids=str
)
@pytest.mark.parametrize("batch", BATCHES)
def test_fill_and_sweep_of_a_layer_equal_the_whole(backend, batch, sizes):
    lengths, documents = BATCHES[batch]
    inputs = layer_tensors(len(lengths), max(lengths))
    results = chunked_layer(backend, *inputs, lengths, documents, sizes)
    for name, a, b in zip(
        ("out", "dq", "dk", "dv"), results, whole_layer(*inputs, lengths, documents), strict=True
    ):
        assert error(a, b) < 1e-13, name


@pytest.mark.parametrize("sizes", [(8, 4, 1), (6, 3, 100), (64, 4, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("batch", BATCHES)
def test_sinks_and_their_gradient(backend, batch, window, sizes):
    """A strong sink, a weak one, and two that are none."""
    if window and backend.name == "library":
        pytest.skip("windows go to other backends")
    lengths, documents = BATCHES[batch]
    inputs = layer_tensors(len(lengths), max(lengths))
    sink = torch.tensor([3.0, -0.5, -50.0, float("-inf")], dtype=torch.float64)
    results = chunked_layer(backend, *inputs, lengths, documents, sizes, window, sink=sink)
    expected = whole_layer(*inputs, lengths, documents, window, sink=sink)
    for name, a, b in zip((*LAYER_NAMES, "dsink"), results, expected, strict=True):
        assert error(a, b) < 1e-13, name
    assert results[4][:2].abs().min() > 1e-3
    without = whole_layer(*inputs, lengths, documents, window)
    assert torch.equal(expected[0][:, :, 3], without[0][:, :, 3])
    assert error(expected[0], without[0]) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sink_dtype", [None, torch.float32], ids=str)
def test_sinks_in_low_precision_are_as_good_as_an_independent_run(backend, dtype, sink_dtype):
    """Some families keep their sinks in fp32."""
    low = layer_tensors(2, 120, dtype)
    sink = torch.randn(4).to(dtype)
    rows = ([120, 120], [[0], [0]])
    expected = whole_layer(*(x.double() for x in low), *rows, sink=sink.double())
    independent = whole_layer(*low, *rows, sink=sink)
    results = chunked_layer(backend, *low, *rows, (16, 4, 2), sink=sink.to(sink_dtype or dtype))
    for name, a, b, c in zip((*LAYER_NAMES, "dsink"), results, independent, expected, strict=True):
        # A sink's gradient is one number per head, which an independent run may hit by chance.
        slack = c.norm() * torch.finfo(dtype).eps / 2 if name == "dsink" else 0.0
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm() + slack, name


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_windows_documents_and_padding_together(data):
    lengths = data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=3).filter(any))
    documents = [
        [0, *sorted(data.draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4)))]
        if length > 1
        else [0]
        for length in lengths
    ]
    page_size = data.draw(st.integers(1, 5))
    sizes = (page_size * data.draw(st.integers(1, 4)), page_size, data.draw(st.integers(1, 3)))
    window = data.draw(st.none() | st.integers(1, 26))
    inputs = layer_tensors(len(lengths), max(lengths))
    results = chunked_layer(
        reference.ReferenceBackend(), *inputs, lengths, documents, sizes, window
    )
    for a, b in zip(results, whole_layer(*inputs, lengths, documents, window), strict=True):
        assert error(a, b) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_swept_layer_in_low_precision_is_as_good_as_an_independent_run(backend, dtype):
    low = layer_tensors(1, 120, dtype)
    expected = whole_layer(*(x.double() for x in low), [120], [[0]])
    independent = whole_layer(*low, [120], [[0]])
    results = chunked_layer(backend, *low, [120], [[0]], (16, 4, 2))
    for a, b, c in zip(results, independent, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm()


def test_error_does_not_grow_with_the_number_of_segments(backend):
    """A last chunk of 16 tokens over a history of 2048, in 1 to 256 segments, in fp32."""
    (q, k, v, grad), wide = tensors(16, 2048 + 16, (2, 1), 16, rows=1, dtype=torch.float32)
    expected = truth(*wide, visible(16, 2048 + 16, Mask(offset=2048, causal=True)))
    plan = plan_chunks([2064], [[0]], chunk_size=2048, page_size=8)
    errors = {}
    for segment_pages in (256, 64, 16, 4, 1):
        history = History(
            [LayerShape(1, 16, torch.float32)],
            pages_per_row=plan.pages_per_row,
            page_size=8,
            segment_pages=segment_pages,
            page_grad_dtype=torch.float32,
            device=CPU,
        )
        history.table.hold(0, 0, 2048)
        history.write(0, 0, 0, k[0, :, :2048], v[0, :, :2048])
        history.open_gradients()
        call = LayerCall(0, SCALE, None, plan.chunks[1], history, backend)
        leaves = [x.detach().requires_grad_() for x in (q, k[:, :, 2048:], v[:, :, 2048:])]
        out, lse = ChunkAttention.apply(*leaves, call)
        grad_q, *own = torch.autograd.grad(out, leaves, grad.transpose(1, 2))
        pages = list(history.segments(0, 0, 0, 2048, gradients=True))
        assert len(pages) == 256 // segment_pages
        grad_k = torch.cat([*(page.grad_k for page in pages), own[0]], 2)
        grad_v = torch.cat([*(page.grad_v for page in pages), own[1]], 2)
        results = (out.detach().transpose(1, 2), lse, grad_q, grad_k, grad_v)
        errors[len(pages)] = [
            float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)
        ]
    for segments, found in errors.items():
        for name, now, alone in zip(NAMES, found, errors[1], strict=True):
            assert now < 2 * alone, (segments, name, errors)


def test_a_kept_result_is_used_instead_of_computing():
    """What `selective` keeps replaces the forward, and backward needs nothing more."""

    class OnlyBackward(reference.ReferenceBackend):
        def forward(self, *_):
            raise AssertionError("attention was computed again")

    q, k, v, grad = layer_tensors(1, 8)
    plan = plan_chunks([8], [[0]], chunk_size=8, page_size=4)
    history = History(
        [LayerShape(2, 4, q.dtype)],
        pages_per_row=plan.pages_per_row,
        page_size=4,
        segment_pages=1,
        page_grad_dtype=q.dtype,
        device=CPU,
    )
    history.open_gradients()
    fresh = LayerCall(0, SCALE, None, plan.chunks[0], history, reference.ReferenceBackend())
    kept = attend(fresh, q, k, v)
    call = LayerCall(0, SCALE, None, plan.chunks[0], history, OnlyBackward(), kept)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = ChunkAttention.apply(*leaves, call)
    assert torch.equal(out, kept[0])
    assert call.kept is None  # nothing hides on the call
    grads = torch.autograd.grad(out, leaves, grad)
    for a, b in zip(
        grads, whole_layer(*(x.detach() for x in leaves), grad, [8], [[0]])[1:], strict=True
    ):
        assert error(a, b) < 1e-13


# -- choosing a backend ---------------------------------------------------------------------------


def choose(name="auto", **changes):
    facts = {"device": CPU, "dtype": torch.float32, "head_dims": {64}, **changes}
    return choose_backend(name, **facts)


def test_auto_says_what_it_chose(caplog):
    with caplog.at_level(logging.INFO, logger="oomb"):
        assert isinstance(choose(), library.CpuFlashBackend)
        assert isinstance(choose(deterministic=True), library.CpuFlashBackend)
        assert isinstance(choose(windows=True), reference.ReferenceBackend)
        assert isinstance(choose(dtype=torch.float8_e4m3fn), reference.ReferenceBackend)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"attention_backend='auto' chose '{name}'"
        for name in ("library", "library", "reference", "reference")
    ]
    assert "sliding window" in caplog.records[2].getMessage()
    assert "float8" in caplog.records[3].getMessage()


def test_a_named_backend_is_taken_without_a_word(caplog):
    with caplog.at_level(logging.INFO, logger="oomb"):
        assert isinstance(choose("reference", windows=True), reference.ReferenceBackend)
        assert isinstance(choose("library"), library.CpuFlashBackend)
    assert not caplog.records


CUDA = torch.device("cuda")
REFUSALS = {
    "sliding window": {"windows": True},
    "float8": {"dtype": torch.float8_e4m3fn},
    "device meta": {"device": torch.device("meta")},
    "float32": {"device": CUDA},
    "deterministic": {"device": CUDA, "dtype": torch.bfloat16, "deterministic": True},
    "multiple of 8 up to 256, got 36": {
        "device": CUDA,
        "dtype": torch.bfloat16,
        "head_dims": {64, 36},
    },
    "got 264": {"device": CUDA, "dtype": torch.float16, "head_dims": {264}},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_library_refuses_by_name_and_auto_falls_to_the_reference(reason, caplog, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    with pytest.raises(ValueError, match="attention_backend='library' cannot run here") as refusal:
        choose("library", **REFUSALS[reason])
    assert reason in str(refusal.value)
    assert "use 'reference' or 'auto'" in str(refusal.value)
    with caplog.at_level(logging.INFO, logger="oomb"):
        assert choose("auto", **REFUSALS[reason]).name == "reference"
    assert reason in caplog.text


@pytest.mark.parametrize("name", ["cudnn", "Library", "", None])
def test_an_unknown_backend_is_refused_with_those_that_are_known(name):
    with pytest.raises(ValueError, match="'auto', 'library', 'triton', 'reference'") as refusal:
        choose(name)
    assert repr(name) in str(refusal.value)


def test_a_torch_without_the_operator_is_named(monkeypatch):
    monkeypatch.setattr(library, "CPU_OP", "no_such_attention")
    with pytest.raises(
        ValueError, match=f"torch {torch.__version__.partition('+')[0]}.*no_such_att"
    ):
        choose("library")


@pytest.mark.parametrize("op", [library.CPU_OP, library.CPU_OP + "_backward"])
def test_a_torch_whose_operator_takes_other_arguments_is_named(op, monkeypatch):
    monkeypatch.setitem(library.ARGUMENTS, op, "query key value window")
    with pytest.raises(ValueError, match=f"operator {op} with other arguments.*query key value"):
        choose("library")
    assert choose("auto").name == "reference"


@pytest.mark.parametrize(
    "mask", [Mask(causal=True), Mask(offset=3, window=3), Mask(causal=True, window=2)], ids=str
)
def test_library_never_computes_a_mask_it_does_not_know(mask):
    """A rectangle that is causal and any window would come out wrong: the engine must not ask."""
    (q, k, v, _), _ = tensors(3, 5)
    if mask.window == 2:
        k, v = k[:, :, :3], v[:, :, :3]
    with pytest.raises(AssertionError):
        library.CpuFlashBackend().forward(q, k, v, SCALE, mask)


def imported(path):
    """Modules that a source file imports, as written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            assert node.level == 0, f"{path} imports relatively"


def test_backends_never_import_each_other_and_only_the_chooser_imports_them():
    """A backend is a file or a folder under impl/. The ladder measures kernels below a backend."""
    impl = Path(oomb.attention.impl.__file__).parent
    package = impl.parent.parent
    names = {path.stem for path in impl.iterdir()} - {"__init__", "__pycache__"}
    assert names == {"library", "reference", "triton"}
    for path in package.rglob("*.py"):
        inside = {name for name in imported(path) if name.startswith("oomb.attention.impl")}
        if impl in path.parents:
            own = path.relative_to(impl).parts[0].removesuffix(".py")
            assert all(name.split(".")[3] == own for name in inside), f"{path} imports {inside}"
        elif path not in (package / "attention" / "choose.py", package / "bench" / "ladder.py"):
            assert not inside, f"{path} imports {inside}"
