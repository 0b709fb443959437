"""On a CUDA GPU: the same exactness, through the kernels that people train with."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    worst_error,
)

import oomb

pytestmark = pytest.mark.gpu

CONFIG = {"chunk_size": 48, "page_size": 16, "segment_pages": 5}
FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "gemma2", "gpt2")


def ids_on_gpu(rows=2, tokens=203):
    return torch.randint(0, 97, (rows, tokens), device="cuda")


def bf16_model(family="qwen2", **config):
    """head_dim 8 and more: what cuDNN takes."""
    return tiny_model(family, torch.bfloat16, hidden_size=64, **config).cuda()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_fp64_gradients_equal_the_whole_run(family, policy):
    model, ids = tiny_model(family).cuda(), ids_on_gpu()
    with true_fp64():
        loss, expected = whole_run(model, ids)
        ours, grads = chunked_run(model, ids, {**CONFIG, "activation_policy": policy})
    assert relative_error(ours, loss) < 1e-10
    error, name = worst_error(grads, expected)
    assert error < 1e-10, name


@pytest.mark.parametrize("tokens", [1, 15, 48, 49, 163])
def test_fp32_gradients_equal_the_whole_run(tokens, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model, ids = tiny_model("llama", torch.float32).cuda(), ids_on_gpu(tokens=tokens)
    _, expected = whole_run(model, ids)
    _, grads = chunked_run(model, ids, CONFIG)
    error, name = worst_error(grads, expected)
    assert error < 1e-5, name


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("tokens", [2, 49, 97, 203])
def test_bf16_error_is_at_most_twice_transformers_own(family, tokens):
    model, ids = bf16_model(family), ids_on_gpu(tokens=tokens)
    twin = twin_in_fp64(model, family, hidden_size=64)
    _, ordinary = whole_run(model, ids)
    config = oomb.EngineConfig(**CONFIG)
    with oomb.Engine(model, config) as engine:
        assert engine.attention_backend == "library"
        engine.step(ids)
    ours = gradients(model)
    model.zero_grad(set_to_none=True)
    with true_fp64():
        _, exact = whole_run(twin, ids)
    for name in exact:
        allowed = 2 * relative_error(ordinary[name], exact[name]) + 1e-3
        assert relative_error(ours[name], exact[name]) <= allowed, name


def test_weight_gradients_accumulate_in_fp32():
    model = bf16_model()
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        engine.step(ids_on_gpu())
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_documents_through_cudnn():
    """Document edges anywhere, single tokens included, against each document alone."""
    model, ids = bf16_model(), ids_on_gpu(rows=1, tokens=150)
    documents = (torch.rand(1, 150) < 0.1).cumsum(1)
    documents[0, 96:] += 1  # a document of one token right at a chunk's start
    documents[0, 97:] += 1
    twin = twin_in_fp64(model, "qwen2", hidden_size=64)
    _, grads = chunked_run(
        model, ids, {**CONFIG, "attention_backend": "library"}, document_ids=documents
    )
    with true_fp64():
        _, exact = chunked_run(
            twin, ids, {**CONFIG, "attention_backend": "reference"}, document_ids=documents
        )
    for name in exact:
        assert relative_error(grads[name], exact[name]) < 0.05, name


def test_deterministic_picks_repeatable_kernels_or_refuses():
    model, ids = bf16_model(), ids_on_gpu()
    with pytest.raises(ValueError, match="deterministic"):
        oomb.Engine(
            model, oomb.EngineConfig(**CONFIG, deterministic=True, attention_backend="library")
        )
    runs = [chunked_run(model, ids, {**CONFIG, "deterministic": True})[1] for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_inputs_may_stay_on_the_cpu():
    model, ids = tiny_model("llama").cuda(), ids_on_gpu()
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0
    _, expected = chunked_run(model, ids, CONFIG, attention_mask=mask)
    _, grads = chunked_run(model, ids.cpu(), CONFIG, attention_mask=mask.cpu())
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, whatever makes the host wait for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize("fused", ["auto", "off"])
def test_a_step_never_makes_the_host_wait(family, policy, fused):
    model = bf16_model(family)
    settings = {
        **CONFIG,
        "attention_backend": "library",
        "activation_policy": policy,
        "fused_kernels": fused,
        "keep_fill_outputs": policy == "layer",
    }
    documents = (torch.arange(203) > 70).long().expand(2, -1)
    with oomb.Engine(model, oomb.EngineConfig(**settings)) as engine:
        for ids, arguments in (
            (ids_on_gpu().cpu(), {}),
            (ids_on_gpu().cpu(), {"document_ids": documents}),
        ):
            engine.step(ids, **arguments)  # compiles kernels, makes buffers
            with waiting_is_an_error():
                engine.step(ids, **arguments)
        ids = ids_on_gpu()
        engine.step(ids)
        steps = engine.iter_step(ids)  # looks at ids, and so waits for them
        with waiting_is_an_error():
            for _ in steps:
                pass
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_outputs_kept_by_the_fill_give_the_same_gradients(policy):
    model, ids = tiny_model("llama", torch.float32).cuda(), ids_on_gpu()
    config = {**CONFIG, "attention_backend": "reference", "activation_policy": policy}
    _, expected = chunked_run(model, ids, config)
    _, grads = chunked_run(model, ids, {**config, "keep_fill_outputs": True})
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_under_another_stream():
    model, ids = bf16_model(), ids_on_gpu()
    _, expected = chunked_run(model, ids, {**CONFIG, "deterministic": True})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _, grads = chunked_run(model, ids, {**CONFIG, "deterministic": True})
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_dropout_is_replayed_and_the_generator_ends_where_one_forward_ends():
    model = tiny_model("gpt2", torch.float32, resid_pdrop=0.2, embd_pdrop=0.1).cuda()
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG, check_replay=True)) as engine:
        torch.manual_seed(3)
        engine.step(ids_on_gpu())
        after_step = torch.cuda.get_rng_state()
        torch.manual_seed(3)
        engine.evaluate(ids_on_gpu())
    assert torch.equal(torch.cuda.get_rng_state(), after_step)


def test_peak_memory_and_timings_are_reported():
    model = bf16_model()
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        result = engine.step(ids_on_gpu())
    assert result.peak_memory >= sum(p.nbytes for p in model.parameters())
    assert result.timings["total"] == pytest.approx(
        result.timings["fill"] + result.timings["sweep"]
    )


def test_memory_returns_to_its_baseline():
    model, ids = bf16_model(), ids_on_gpu(rows=1, tokens=1000)
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        engine.step(ids)
        before = torch.cuda.memory_allocated()
        engine.step(ids)
        assert torch.cuda.memory_allocated() == before
        steps = engine.iter_step(ids)
        for _ in range(30):
            next(steps)
        steps.close()
        assert torch.cuda.memory_allocated() == before
