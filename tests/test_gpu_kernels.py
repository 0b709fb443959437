"""The kernels on a CUDA GPU: what the interpreter cannot show. See also `oomb.bench.cells`."""

import pytest
import torch
from helpers import (
    chunked_run,
    gradients,
    relative_error,
    tiny_model,
    true_fp64,
    twin_in_fp64,
    whole_run,
)
from layers import chunked_layer, layer_tensors, whole_layer

import oomb
from oomb.attention.merge import merge
from oomb.bench.cells import HEAD_DIMS, Cell, check

pytestmark = pytest.mark.gpu
NAMES = ("out", "dq", "dk", "dv")


def backend(accumulate="owner"):
    from oomb.attention.impl.triton.backend import TritonBackend

    return TritonBackend(accumulate)


@pytest.mark.parametrize("mask", ["dense", "window", "documents"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_cells_are_right(dtype, dim, mask):
    row = check(Cell(dtype, dim, 64, mask))
    assert row.get("right"), row


@pytest.mark.parametrize("tokens", [63, 100, 111, 1000])
@pytest.mark.parametrize("page", [16, 48, 128])
def test_odd_lengths_and_pages(tokens, page):
    inputs = layer_tensors(1, tokens, torch.bfloat16, (7, 1), 128, "cuda")
    row = ([tokens], [[0]])
    results = chunked_layer(backend(), *inputs, *row, (page * 3, page, 2), scatter=True)
    exact = whole_layer(*(x.double() for x in inputs), *row)
    independent = whole_layer(*inputs, *row)
    for name, ours, theirs, truth in zip(NAMES, results, independent, exact, strict=True):
        assert relative_error(ours, truth) <= 2 * relative_error(theirs, truth), name


@pytest.mark.parametrize("documents", [[0], [0, 300, 700]], ids=["one", "documents"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_without_a_copy_engine(dim, documents, monkeypatch):
    """As on Ampere and Ada: every tile is loaded row by row."""
    monkeypatch.setattr("oomb.attention.impl.triton.part.has_copy_engine", lambda _: False)
    monkeypatch.setattr("oomb.attention.impl.triton.part.capability_of", lambda _: (8, 0))
    monkeypatch.setattr("oomb.attention.impl.triton.configs._remembered", {})
    inputs = layer_tensors(2, 1000, torch.bfloat16, (14, 2), dim, "cuda")
    row = ([1000, 900], [documents, [0]])
    results = chunked_layer(backend(), *inputs, *row, (384, 64, 2), scatter=True)
    exact = whole_layer(*(x.double() for x in inputs), *row)
    independent = whole_layer(*inputs, *row)
    for name, ours, theirs, truth in zip(NAMES, results, independent, exact, strict=True):
        assert relative_error(ours, truth) <= 2 * relative_error(theirs, truth), name


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16], ids=str)
def test_atomic_additions_agree_and_owners_repeat_their_bits(grads):
    inputs = layer_tensors(1, 2000, torch.bfloat16, (14, 2), 128, "cuda")

    def run(accumulate):
        sizes = (512, 128, 1)
        return chunked_layer(
            backend(accumulate), *inputs, [2000], [[0]], sizes, grads=grads, scatter=True
        )

    first, second, atomic = run("owner"), run("owner"), run("atomic")
    for name, a, b, c in zip(NAMES, first, second, atomic, strict=True):
        assert torch.equal(a, b), name
        assert relative_error(c, a) < 0.02, name


def test_under_another_stream():
    inputs = layer_tensors(1, 600, torch.bfloat16, (4, 2), 64, "cuda")
    arguments = ([600], [[0]], (256, 64, 1))
    expected = chunked_layer(backend(), *inputs, *arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = chunked_layer(backend(), *inputs, *arguments)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("page", [16, 128])
def test_pages_behind_2_to_the_31_numbers(page):
    """Page gradients in fp32 and K/V in bf16, both with more numbers than an int32 counts."""
    from oomb.attention.impl.triton.backend import backward, forward, row_dots
    from oomb.attention.impl.triton.part import Part

    heads, dim, keys, queries = 4, 128, 256, 128
    far = 2**31 // (heads * dim) + 1000
    far -= far % page

    def run(first_row, rows):
        torch.manual_seed(0)
        buffers = [torch.empty(1, heads, rows, dim, device="cuda", dtype=torch.bfloat16)] * 2
        buffers = [torch.empty_like(buffers[0].transpose(1, 2)).transpose(1, 2) for _ in range(2)]
        grads = torch.zeros(1, rows, heads, dim, device="cuda", dtype=torch.float32)
        grads = grads.transpose(1, 2)
        for buffer in buffers:
            buffer[:, :, first_row : first_row + keys] = torch.randn(
                1, heads, keys, dim, device="cuda"
            )
        table = torch.arange(first_row, first_row + keys, page, device="cuda", dtype=torch.int32)
        part = Part(*buffers, keys, grads, grads, table, page, offset=keys)
        q, grad = (
            torch.randn(1, queries, heads, dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        out = torch.empty_like(q)
        lse = torch.empty(1, heads, queries, device="cuda")
        q = q.transpose(1, 2)
        forward(part, q, 0.1, out, lse)
        grad_q = torch.empty_like(q)
        delta = row_dots(out, grad)
        backward(part, q, grad.transpose(1, 2), lse, delta, 0.1, grad_q)
        return out, grad_q, grads[:, :, first_row : first_row + keys].clone()

    expected = run(0, keys)
    found = run(far, far + keys)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert expected[2].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 31, 100])
def test_the_fused_merge_is_the_merge(dtype, tokens):
    wide = torch.promote_types(dtype, torch.float32)
    parts = [
        (torch.randn(2, 3, tokens, 80, dtype=dtype), torch.randn(2, 3, tokens, dtype=wide))
        for _ in range(2)
    ]
    parts[0][1][0, :, ::3] = parts[1][1][:, 0, ::2] = float("-inf")
    expected = merge(*parts, dtype)
    parts[0][0][0, :, ::3] = float("nan")  # where a part weighs nothing
    found = merge(*(tuple(x.cuda() for x in part) for part in parts), dtype)
    seen = expected[1] > float("-inf")
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0].cpu()[seen], expected[0][seen])
    assert not found[0].cpu()[~seen].any()


def test_a_tile_too_large_for_this_gpu_gives_way(monkeypatch):
    from oomb.attention.impl.triton import configs
    from oomb.attention.impl.triton import part as module

    monkeypatch.setattr(configs, "_remembered", {})
    huge = configs.Tile(128, 128, 8, 5)
    own = configs.tiles
    monkeypatch.setattr(module, "tiles", lambda *a, **k: [huge, *own(*a, **k)])
    inputs = layer_tensors(1, 300, torch.bfloat16, (2, 1), 256, "cuda")
    results = chunked_layer(backend(), *inputs, [300], [[0]], (128, 128, 1))
    assert all(number > 0 for number in configs._remembered.values())
    exact = whole_layer(*(x.double() for x in inputs), [300], [[0]])
    assert all(relative_error(a, b) < 0.02 for a, b in zip(results, exact, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_a_model_with_rows_of_unequal_length(family, packed):
    model = tiny_model(family, torch.bfloat16, hidden_size=64).cuda()
    ids = torch.randint(0, 97, (3, 203), device="cuda")
    arguments = {"attention_mask": torch.ones_like(ids)}
    arguments["attention_mask"][1, 100:] = 0
    if packed:
        arguments = {"document_ids": (torch.rand(3, 203, device="cuda") < 0.05).cumsum(1)}
    twin = twin_in_fp64(model, family, hidden_size=64)
    settings = {"chunk_size": 48, "page_size": 16, "segment_pages": 2}
    _, found = chunked_run(model, ids, {**settings, "attention_backend": "triton"}, **arguments)
    with true_fp64():
        _, exact = chunked_run(
            twin, ids, {**settings, "attention_backend": "reference"}, **arguments
        )
    for name in exact:
        assert relative_error(found[name], exact[name]) < 0.05, name


def test_auto_masks_documents_itself():
    """cuDNN would plan anew for each document's length."""
    model = tiny_model("qwen2", torch.bfloat16, hidden_size=64).cuda()
    ids = torch.randint(0, 97, (1, 150), device="cuda")
    documents = (torch.rand(1, 150, device="cuda") < 0.1).cumsum(1)
    with oomb.Engine(model, oomb.EngineConfig(chunk_size=48, page_size=16)) as engine:
        assert engine.attention_backend == "library"
        backends = {
            each.backend.name for each in engine._prepare(ids, None, None, None, documents, None)[2]
        }
        assert backends == {"triton"}
        engine.step(ids, document_ids=documents)
    assert all(grad.isfinite().all() for grad in gradients(model).values())


def test_a_whole_run_in_fp32_through_triton():
    model = tiny_model("llama", torch.float32, hidden_size=64).cuda()
    ids = torch.randint(0, 97, (2, 163), device="cuda")
    twin = twin_in_fp64(model, "llama", hidden_size=64)
    _, ordinary = whole_run(model, ids)
    _, found = chunked_run(
        model, ids, {"chunk_size": 48, "page_size": 16, "attention_backend": "triton"}
    )
    with true_fp64():
        _, exact = whole_run(twin, ids)
    for name in exact:
        allowed = 2 * relative_error(ordinary[name], exact[name]) + 1e-6
        assert relative_error(found[name], exact[name]) <= allowed, name
