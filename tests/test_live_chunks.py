"""Several chunks alive at once: the same gradients, and fewer forwards."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers import gradients, tiny_model

import oomb
from oomb import passes

SIZES = {"chunk_size": 12, "page_size": 4, "activation_policy": "keep"}
TOKENS, CHUNKS, LAYERS = 41, 4, 2


def batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    if kind == "plain":
        return {"input_ids": ids}
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 30:] = 0
    documents = torch.zeros(2, TOKENS, dtype=torch.int64)
    documents[0, 7:], documents[1, 25:] = 1, 1
    return {"input_ids": ids, "attention_mask": mask, "document_ids": documents}


def run(model: torch.nn.Module, kind: str = "plain", **settings):
    model.zero_grad()
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, **settings)) as engine:
        loss = engine.step(**batch(kind)).loss
        grads = gradients(model)
        model.zero_grad()
    return loss, grads


@pytest.mark.parametrize("backend", ["reference", "library"])
@pytest.mark.parametrize("live", [2, 3, CHUNKS, 99])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("kind", ["plain", "documents and padding"])
def test_gradients_have_the_same_bits(family, kind, live, backend):
    model = tiny_model(family, torch.float32)
    loss, expected = run(model, kind, attention_backend=backend)
    live_loss, found = run(model, kind, attention_backend=backend, live_chunks=live)
    assert torch.equal(live_loss, loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("extra", [{"keep_fill_outputs": True}, {"check_replay": True}])
def test_it_goes_with_the_other_settings(extra):
    model = tiny_model("llama", torch.float32)
    _, expected = run(model)
    _, found = run(model, live_chunks=2, **extra)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_dropout_draws_the_same_numbers():
    model = tiny_model("gpt2", torch.float32, resid_pdrop=0.1, embd_pdrop=0.1).train()
    torch.manual_seed(1)
    _, expected = run(model)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    _, found = run(model, live_chunks=3)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("live", "forwards"), [(1, 7), (2, 6), (3, 5), (4, 4), (9, 4)])
def test_live_chunks_run_forward_once(live, forwards, monkeypatch):
    model = tiny_model("llama", torch.float32)
    ran = []
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, live_chunks=live)) as engine:
        forward = passes.Passes._forward
        monkeypatch.setattr(
            passes.Passes, "_forward", lambda self, chunk: ran.append(chunk) or forward(self, chunk)
        )
        engine.step(**batch("plain"))
    assert len(ran) == forwards


def test_no_graph_outlives_an_abandoned_step():
    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(**SIZES, live_chunks=3)
    engine = oomb.Engine(model, config)
    steps = engine.iter_step(**batch("plain"))
    for _ in range(CHUNKS - 1):
        next(steps)
    live = steps.gi_frame.f_locals["passes"]._live
    assert len(live) == 2
    hidden = [weakref.ref(output.last_hidden_state) for output, _ in live.values()]
    del live
    steps.close()
    gc.collect()
    assert all(ref() is None for ref in hidden)
    assert all(parameter.grad is None for parameter in model.parameters())
    engine.step(**batch("plain"))
    engine.close()


def test_only_whole_chunks_can_stay_alive():
    with pytest.raises(ValueError, match="use activation_policy='keep' or live_chunks=1"):
        oomb.EngineConfig(live_chunks=2, activation_policy="selective")
    with pytest.raises(ValueError, match="live_chunks must be at least 1, got 0"):
        oomb.EngineConfig(live_chunks=0)
