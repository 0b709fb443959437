"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter.

A kernel may err at most twice as much as an independent run in PyTorch, in the same dtype.
"""

import pytest
import torch
from helpers import chunked_run, tiny_model, whole_run, worst_error
from layers import BATCHES, chunked_layer, layer_tensors, whole_layer

from oomb.attention import choose_backend

triton = pytest.importorskip("triton", reason="needs Triton")
from triton.runtime.errors import OutOfResources  # noqa: E402

from oomb.attention.impl.triton import configs  # noqa: E402
from oomb.attention.impl.triton.backend import TritonBackend  # noqa: E402
from oomb.attention.impl.triton.configs import KERNELS, Tile, launch_first_that_fits  # noqa: E402
from oomb.attention.impl.triton.part import Part  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLACK = 1e-6
"""An independent run may happen to be exact where a kernel rounds once."""


def check(
    sizes, batch=([100], [[0]]), *, dtype=torch.float32, dim=16, heads=(4, 2), window=None,
    accumulate="owner", grads=None, inputs=None, sink=None,
):  # fmt: skip
    """Fill and sweep against fp64; returns what the kernels gave."""
    lengths, documents = batch
    if inputs is None:
        inputs = layer_tensors(len(lengths), max(lengths), dtype, heads, dim, DEVICE)
    backend = TritonBackend(accumulate)
    results = chunked_layer(
        backend, *inputs, lengths, documents, sizes, window, grads, scatter=True, sink=sink
    )
    wide_sink = None if sink is None else sink.double()
    exact = whole_layer(*(x.double() for x in inputs), lengths, documents, window, wide_sink)
    independent = whole_layer(*inputs, lengths, documents, window, sink)
    names = ("out", "dq", "dk", "dv", "dsink")[: len(results)]
    for name, ours, theirs, truth in zip(names, results, independent, exact, strict=True):
        size = truth.norm().clamp(min=1.0)  # with a window of 1, dq is 0
        error, allowed = ((x.double() - truth).norm() / size for x in (ours, theirs))
        slack = SLACK
        if name == "dsink":  # one sum per head: an independent run's roundings may cancel by chance
            terms = (exact[0] * inputs[3].double()).abs().sum(-1)
            slack += torch.finfo(dtype).eps / 2 * terms.norm() / size
        assert error <= 2 * allowed + slack, (name, float(error), float(allowed))
    return results


@pytest.mark.parametrize(
    ("dim", "heads"), [(16, (4, 4)), (64, (4, 2)), (80, (2, 1)), (96, (2, 1)), (256, (7, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dims_and_groups(dim, heads, dtype):
    check((64, 32, 1), dtype=dtype, dim=dim, heads=heads)


@pytest.mark.parametrize("tokens", [63, 100, 111])
@pytest.mark.parametrize(
    "sizes", [(48, 16, 1), (48, 24, 2), (48, 48, 1), (64, 64, 1), (128, 32, 3)]
)
def test_pages_of_any_size_lie_anywhere(sizes, tokens):
    """Tiles inside pages, and tiles gathered from several; the last page is not full."""
    check(sizes, ([tokens], [[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(48, 24, 2), (64, 64, 1)], ids=str)
@pytest.mark.parametrize("batch", [([100], [[0]]), *BATCHES.values()], ids=["one", *BATCHES])
def test_gpus_without_a_copy_engine(batch, sizes, dtype, monkeypatch):
    """Ampere and Ada load every tile row by row."""
    monkeypatch.setattr("oomb.attention.impl.triton.part.has_copy_engine", lambda _: False)
    check(sizes, batch, dtype=dtype, window=None, dim=24)


@pytest.mark.parametrize("window", [2, 5, 32, 50, 99, 100])
@pytest.mark.parametrize("sizes", [(32, 16, 1), (64, 32, 2)], ids=str)
def test_windows(window, sizes):
    check(sizes, window=window)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [None, 3])
def test_documents_and_padding(batch, window):
    check((16, 4, 1), BATCHES[batch], window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 5, 50])
@pytest.mark.parametrize("batch", ["one row", "right padding, one row empty", "packed", "long"])
def test_sinks(batch, window, dtype):
    """A strong sink, a weak one, and two that are none."""
    lengths, documents = BATCHES.get(batch, ([100], [[0]]))
    sink = torch.tensor([3.0, -0.5, -50.0, float("-inf")], dtype=dtype, device=DEVICE)
    sizes = (32, 16, 1) if batch == "long" else (16, 4, 2)
    results = check(sizes, (lengths, documents), dtype=dtype, window=window, sink=sink)
    assert results[4][:2].abs().min() > 1e-3


def test_documents_longer_than_a_tile():
    check((64, 32, 1), ([150, 90], [[0, 1, 70, 149], [0, 64]]), window=None)


@pytest.mark.parametrize("grads", [torch.float16, torch.float32], ids=str)
def test_page_gradients_in_their_own_dtype(grads):
    check((32, 16, 1), dtype=torch.float16, grads=grads)


def test_atomic_additions_give_the_same_up_to_rounding():
    inputs = layer_tensors(1, 100, torch.float32, dim=16, device=DEVICE)
    owner = check((32, 16, 1), inputs=inputs)
    atomic = check((32, 16, 1), inputs=inputs, accumulate="atomic")
    for a, b in zip(owner, atomic, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_runs_give_the_same_bits():
    inputs = layer_tensors(1, 100, torch.float16, dim=16, device=DEVICE)
    runs = [check((32, 16, 1), inputs=inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_inputs_may_lie_in_any_layout():
    """Token-major, head-major, at odd offsets, and with a head dim that is not adjacent."""
    q, k, v, grad = layer_tensors(2, 70, torch.float32, dim=16, device=DEVICE)
    sizes, batch = (32, 16, 1), ([70, 70], [[0], [0]])
    expected = check(sizes, batch, inputs=(q, k, v, grad))
    odd = torch.zeros(q.numel() + 3, device=DEVICE)[3:].view(q.shape).copy_(q)
    layouts = [
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        (odd, k.mT.contiguous().mT, torch.cat([v, v], -1)[..., :16]),
    ]
    for inputs in layouts:
        results = check(sizes, batch, inputs=(*inputs, grad))
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_model_end_to_end(family):
    changes = {"sliding_window": 20} if family == "mistral" else {}
    model = tiny_model(family, torch.float32, **changes).to(DEVICE)
    ids = torch.randint(0, 97, (1, 75), device=DEVICE)
    loss, expected = whole_run(model, ids)
    ours, found = chunked_run(
        model, ids, {"chunk_size": 32, "page_size": 16, "attention_backend": "triton"}
    )
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
    error, name = worst_error(found, expected)
    assert error < 2e-5, name


# -- refusals and choices -------------------------------------------------------------------------


def choose(**changes):
    arguments = {"device": torch.device(DEVICE), "dtype": torch.float32, "head_dims": {64}}
    return choose_backend("triton", **(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dims": {12}}, "multiple of 8 up to 256, got 12"),
        ({"head_dims": {64, 264}}, "multiple of 8 up to 256, got 264"),
        ({"dtype": torch.float64}, "bfloat16, torch.float16, torch.float32.*float64"),
        ({"device": torch.device("meta")}, "needs a CUDA GPU.*meta"),
        ({"accumulate": "atomic", "deterministic": True}, "another order on every run"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(changes, reason):
    with pytest.raises(ValueError, match=reason):
        choose(**changes)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU multiplies bfloat16 right")
def test_the_interpreter_refuses_bfloat16():
    with pytest.raises(ValueError, match="interpreter multiplies bfloat16 matrices wrongly"):
        choose(dtype=torch.bfloat16)


def test_atomic_belongs_to_triton():
    with pytest.raises(ValueError, match="for attention_backend='triton', got 'library'"):
        choose_backend(
            "library", device=torch.device("cpu"), dtype=torch.float32, head_dims={8},
            accumulate="atomic",
        )  # fmt: skip


@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_every_device_has_tiles_down_to_the_smallest(kernel, capability, dtype, width):
    found = configs.tiles(kernel, capability, dtype, width, cut=True)
    assert found[-1] == Tile(16, 16, 4, 1)
    if capability == (9, 0) and (dtype.itemsize, width) == (2, 128):
        assert found[0] != configs.tiles(kernel, (8, 0), dtype, width, cut=True)[0]


def part(page, *, copies=True):
    k = torch.empty(1, 2, 512, 128, dtype=torch.bfloat16, device=DEVICE)
    return Part(k, k, 512, page=page, copies=copies)


@pytest.mark.parametrize(
    ("page", "expected"),
    [(0, (128, False)), (256, (128, False)), (128, (128, False)), (64, (64, False)),
     (96, (32, False)), (48, (128, True)), (16, (128, True))],
)  # fmt: skip
def test_tiles_lie_inside_pages_or_are_gathered(page, expected):
    assert part(page).fit(Tile(64, 128, 8, 2)) == expected
    assert part(page, copies=False).fit(Tile(64, 128, 8, 2)) == (128, True)


def test_tiles_that_a_page_holds_whole_go_first(monkeypatch):
    offered = [Tile(64, 128, 8, 3), Tile(64, 64, 4, 2)]
    monkeypatch.setattr("oomb.attention.impl.triton.part.tiles", lambda *_, **__: list(offered))
    assert part(128).candidates("key_grads") == offered
    assert part(64).candidates("key_grads") == offered[::-1]


def test_a_tile_that_does_not_fit_gives_way_to_a_smaller_one(monkeypatch):
    monkeypatch.setattr(configs, "_remembered", {})
    tried = []

    def launch(tile):
        tried.append(tile.keys)
        if tile.keys > 32:
            raise OutOfResources(300_000, 232_448, "shared memory")

    tiles = [Tile(64, keys, 4, 2) for keys in (128, 64, 32, 16)]
    launch_first_that_fits(("attend",), tiles, launch)
    launch_first_that_fits(("attend",), tiles, launch)
    assert tried == [128, 64, 32, 32]  # the second time it is remembered
    with pytest.raises(RuntimeError, match=r"no tile of kernel other fits.*'reference'"):
        launch_first_that_fits(("other",), tiles[:2], launch)
