"""Sinks on a CUDA GPU, on every backend: what the interpreter and the CPU's kernels cannot show."""

import pytest
import torch
from helpers import chunked_run, relative_error, tiny_model, true_fp64, twin_in_fp64, whole_run
from layers import chunked_layer, layer_tensors, whole_layer

import oomb
from oomb.attention import choose_backend

pytestmark = pytest.mark.gpu
NAMES = ("out", "dq", "dk", "dv", "dsink")
DTYPE = torch.bfloat16
BATCHES = {
    "one": ([1000], [[0]]),
    "documents and padding": ([1000, 700], [[0, 300, 301], [0]]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sink_dtype", [DTYPE, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "window"),
    [("library", None), ("triton", None), ("triton", 100), ("reference", None), ("reference", 100)],
)
def test_every_backend_is_as_good_as_an_independent_run(name, window, sink_dtype, batch):
    """A strong sink, a weak one, one that weighs nothing and one that is none, for each KV head."""
    lengths, documents = BATCHES[batch]
    backend = choose_backend(name, device=torch.device("cuda"), dtype=DTYPE, head_dims={64})
    inputs = layer_tensors(len(lengths), max(lengths), DTYPE, (8, 2), 64, "cuda")
    sink = torch.tensor([4.0, -0.5, -50.0, float("-inf")] * 2, device="cuda", dtype=sink_dtype)
    sizes = (192, 48, 2)
    results = chunked_layer(
        backend, *inputs, lengths, documents, sizes, window, scatter=True, sink=sink
    )
    wide = [x.double() for x in inputs]
    exact = whole_layer(*wide, lengths, documents, window, sink.double())
    independent = whole_layer(*inputs, lengths, documents, window, sink.to(DTYPE))
    for what, ours, theirs, truth in zip(NAMES, results, independent, exact, strict=True):
        assert ours.isfinite().all()
        # A sink's gradient is one number per head, which an independent run may hit by chance.
        slack = torch.finfo(DTYPE).eps / 2 if what == "dsink" else 0.0
        allowed = 2 * relative_error(theirs.double(), truth) + slack
        assert relative_error(ours.double(), truth) <= allowed, what
    assert results[4].dtype == torch.float32


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
@pytest.mark.parametrize("offload", [None, oomb.OffloadConfig(poison=True)], ids=["", "offloaded"])
def test_gpt_oss_in_fp32(backend, offload):
    """Windows on every other layer, experts and their router's loss."""
    changes = {"hidden_size": 64, "head_dim": 16, "sliding_window": 37}
    model = tiny_model("gpt_oss", torch.float32, **changes).cuda()
    ids = torch.randint(0, 97, (2, 163), device="cuda")
    config = {
        "chunk_size": 48,
        "page_size": 16,
        "segment_pages": 2,
        "attention_backend": backend,
        "offload": offload,
    }
    _, ordinary = whole_run(model, ids)
    _, found = chunked_run(model, ids, config)
    with true_fp64():
        _, exact = whole_run(twin_in_fp64(model, "gpt_oss", **changes), ids)
    for name in exact:
        allowed = 2 * relative_error(ordinary[name], exact[name]) + 1e-6
        assert relative_error(found[name], exact[name]) <= allowed, name
