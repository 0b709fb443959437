"""Offloading on a CUDA GPU: real streams, real pinned memory, and kernels that come late."""

import gc
from contextlib import contextmanager

import pytest
import torch
from helpers import gradients, tiny_model

import oomb
from oomb.offload.cuda import CudaTier, MappedMemory
from oomb.offload.ring import SegmentRing

pytestmark = pytest.mark.gpu
CONFIG = {"chunk_size": 96, "page_size": 16, "segment_pages": 4}
SLOW = 20_000_000
"""GPU cycles: about ten milliseconds."""


def model_and_ids(tokens=1000, rows=2):
    torch.manual_seed(0)
    model = tiny_model("llama", torch.bfloat16, hidden_size=64, head_dim=16).cuda()
    return model, torch.randint(0, 97, (rows, tokens), device="cuda")


def run(model, ids, offload, steps=1, **settings):
    """Triton repeats its bits; the cuDNN backward does not."""
    config = {**CONFIG, "attention_backend": "triton", "deterministic": True, **settings}
    model.zero_grad()
    with oomb.Engine(model, oomb.EngineConfig(**config, offload=offload)) as engine:
        for _ in range(steps):
            loss = engine.step(ids).loss
        grads = gradients(model)
        model.zero_grad()
    return loss, grads


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def offload(**settings):
    return oomb.OffloadConfig(**{"poison": True, **settings})


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize(("segment", "depth"), [(1, 2), (4, 3), (6, 4)])
def test_gradients_have_the_bits_of_one_tier(policy, outputs, segment, depth):
    """Over several steps, so that buffers and slabs are used again."""
    model, ids = model_and_ids()
    settings = {
        "activation_policy": policy,
        "keep_fill_outputs": outputs,
        "segment_pages": segment,
        "page_grad_dtype": torch.bfloat16 if policy == "layer" else torch.float32,
    }
    expected = run(model, ids, None, steps=3, **settings)
    assert same(run(model, ids, offload(ring_depth=depth), steps=3, **settings), expected)


@pytest.mark.parametrize("budget", [200_000, 2_000_000])
def test_a_budget_changes_no_bit(budget):
    model, ids = model_and_ids()
    expected = run(model, ids, None)
    assert same(run(model, ids, offload(gpu_budget=budget)), expected)


def test_the_librarys_kernels_agree_with_one_tier():
    model, ids = model_and_ids()
    settings = {"attention_backend": "library", "deterministic": False}
    _, expected = run(model, ids, None, **settings)
    _, found = run(model, ids, offload(), **settings)
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 2e-2 * grad.norm(), name


def test_under_another_stream():
    model, ids = model_and_ids()
    expected = run(model, ids, None)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = run(model, ids, offload())
        torch.cuda.synchronize()
    assert same(found, expected)


@contextmanager
def late(monkeypatch, method, *, before):
    """Kernels, or copies, that take their time before or after an operation of the tier."""
    real = getattr(CudaTier, method)

    def slow(self, *arguments):
        if before:
            torch.cuda._sleep(SLOW)
        result = real(self, *arguments)
        if not before:
            torch.cuda._sleep(SLOW)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(CudaTier, method, slow)
        yield


@pytest.mark.parametrize("method", ["begin", "end", "copy_in", "copy_out"])
@pytest.mark.parametrize("before", [True, False])
def test_late_kernels_change_nothing(method, before, monkeypatch):
    model, ids = model_and_ids(tokens=400)
    settings = {"keep_fill_outputs": True}
    expected = run(model, ids, None, **settings)
    with late(monkeypatch, method, before=before):
        assert same(run(model, ids, offload(ring_depth=2), **settings), expected)


@pytest.mark.parametrize("stream", ["_in", "_out"])
def test_late_copies_change_nothing(stream, monkeypatch):
    model, ids = model_and_ids(tokens=400)
    expected = run(model, ids, None)
    for name in ("copy_in", "copy_out"):
        real = getattr(CudaTier, name)

        def slow(self, *arguments, real=real):
            with torch.cuda.stream(getattr(self, stream)):
                torch.cuda._sleep(SLOW)
            return real(self, *arguments)

        monkeypatch.setattr(CudaTier, name, slow)
    assert same(run(model, ids, offload(ring_depth=2)), expected)


@pytest.mark.parametrize("forgotten", ["begin", "copy_in", "copy_out"])
def test_a_forgotten_wait_shows(forgotten, monkeypatch):
    model, ids = model_and_ids(tokens=600)
    expected = run(model, ids, None)
    real = getattr(CudaTier, forgotten)
    monkeypatch.setattr(
        CudaTier, forgotten, lambda self, what, after, *layer: real(self, what, (), *layer)
    )
    slowed = "copy_out" if forgotten != "begin" else "copy_in"
    other = getattr(CudaTier, slowed)

    def slow(self, *arguments):
        torch.cuda._sleep(SLOW)  # kernels fall behind the copies
        with torch.cuda.stream(self._out if slowed == "copy_out" else self._in):
            torch.cuda._sleep(SLOW)
        return other(self, *arguments)

    monkeypatch.setattr(CudaTier, slowed, slow)
    assert not same(run(model, ids, offload(poison=False, ring_depth=2)), expected)


def memory():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("end", ["closed", "raised", "finished"])
def test_memory_returns_to_its_baseline(end, monkeypatch):
    model, ids = model_and_ids()
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        engine.step(ids)  # what libraries keep for good, such as cuBLAS' workspace
    model.zero_grad(set_to_none=True)
    unregistered = []
    free = MappedMemory.free
    monkeypatch.setattr(
        MappedMemory,
        "free",
        lambda self: (unregistered.append(len(self._registered)), free(self))[1],
    )
    before = memory()
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG, offload=offload()))
    attached = memory()
    steps = engine.iter_step(ids)
    for _ in range(15 if end != "finished" else 10**6):
        if next(steps, None) is None:
            break
    if end == "closed":
        steps.close()
    elif end == "raised":
        with pytest.raises(KeyError):
            steps.throw(KeyError("stop"))
    del steps
    model.zero_grad(set_to_none=True)
    assert memory() <= attached
    assert engine.host_memory > 0
    engine.close()
    assert engine.host_memory == 0
    assert memory() <= before
    assert sum(unregistered) > 0


def test_running_out_of_memory_leaves_nothing(monkeypatch):
    model, ids = model_and_ids()
    engine = oomb.Engine(model, oomb.EngineConfig(**CONFIG, offload=offload()))
    before = memory()
    holding = SegmentRing.holding
    calls = []

    def full(self, load):
        calls.append(load)
        if len(calls) == 40:
            raise torch.OutOfMemoryError("no")
        return holding(self, load)

    monkeypatch.setattr(SegmentRing, "holding", full)
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(ids)
    monkeypatch.setattr(SegmentRing, "holding", holding)
    assert memory() <= before
    engine.step(ids)
    engine.close()


def test_pinned_memory_is_what_was_asked_for():
    sizes = [3_000_000, 5_000_001, 0, 4096]
    host = MappedMemory(sizes, "test", pinned=True)
    assert [piece.numel() for piece in host.pieces] == sizes
    assert all(piece.is_pinned() for piece in host.pieces if piece.numel())
    assert host.nbytes <= sum(sizes) + 4096 * len(sizes)
    there = torch.arange(4096, dtype=torch.uint8, device="cuda")
    host.pieces[3].copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host.pieces[3], there.cpu())
    host.free()


def test_memory_that_cannot_be_pinned_is_refused_and_nothing_kept(monkeypatch):
    monkeypatch.setattr(
        "oomb.offload.cuda._register", lambda piece: 2 if piece.numel() == 8192 else 0
    )
    freed = []
    monkeypatch.setattr(
        torch.cuda.cudart(), "cudaHostUnregister", lambda at: freed.append(at), raising=False
    )
    with pytest.raises(MemoryError, match=r"GiB of pinned host memory.*CUDA error 2.*gpu_budget"):
        MappedMemory([4096, 8192, 4096], "test", pinned=True)
    assert len(freed) == 2


def test_a_step_never_makes_the_host_wait():
    """As without offload: copies and kernels are ordered by events alone."""
    model, ids = model_and_ids()
    ids = ids.cpu()  # those on a GPU are looked at when a step is asked for
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG, offload=oomb.OffloadConfig())) as engine:
        engine.step(ids)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.step(ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
