"""Attention outputs kept by the fill: the same gradients, without running attention again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import gradients, tiny_model

import oomb
from oomb import passes
from oomb.attention import function
from oomb.profiling import LiveBytes

SIZES = {"chunk_size": 12, "page_size": 4, "attention_backend": "reference"}
TOKENS, CHUNKS, LAYERS = 41, 4, 2
PER_TOKEN = LAYERS * 4 * (8 * 4 + 4)  # heads x (dim in fp32, log-sum-exp in fp32)


def ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def run(model: torch.nn.Module, **settings: Any):
    arguments = settings.pop("arguments", {})
    model.zero_grad()
    with oomb.Engine(model, oomb.EngineConfig(**{**SIZES, **settings})) as engine:
        loss = engine.step(ids(), **arguments).loss
        grads = gradients(model)
        model.zero_grad()
    return loss, grads


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("batch", ["plain", "documents and padding"])
def test_gradients_have_the_same_bits(family, policy, batch):
    arguments = {}
    if batch != "plain":
        mask = torch.ones(2, TOKENS, dtype=torch.int64)
        mask[1, 30:] = 0
        documents = torch.zeros(2, TOKENS, dtype=torch.int64)
        documents[0, 7:] = 1
        arguments = {"attention_mask": mask, "document_ids": documents}
    model = tiny_model(family, torch.float32)
    settings = {"activation_policy": policy, "arguments": arguments}
    loss, expected = run(model, **settings)
    kept_loss, kept = run(model, **settings, keep_fill_outputs=True)
    assert torch.equal(kept_loss, loss)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("policy", "again"), [("keep", 1), ("selective", 1), ("layer", 2)])
@pytest.mark.parametrize("keep", [False, True])
def test_attention_runs_forward_once_per_chunk(policy, again, keep, monkeypatch):
    calls = {"fill": 0, "sweep": 0}
    attend = function.attend

    def counted(phase):
        def run(*arguments):
            calls[phase] += 1
            return attend(*arguments)

        return run

    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(**SIZES, activation_policy=policy, keep_fill_outputs=keep)
    with oomb.Engine(model, config) as engine:
        monkeypatch.setattr(passes, "attend", counted("fill"))
        monkeypatch.setattr(function, "attend", counted("sweep"))
        engine.step(ids())
    sweeps = 1 if keep else CHUNKS  # the last chunk has no fill
    fills = (CHUNKS - 1) * LAYERS
    if not keep:
        fills -= CHUNKS - 2  # the last layer needs pages only, once the first chunk has shown it
    assert calls == {"fill": fills, "sweep": sweeps * again * LAYERS}


def test_bytes_alive_are_those_of_the_chunks_not_swept_yet():
    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(**SIZES, keep_fill_outputs=True)
    with oomb.Engine(model, config) as engine, LiveBytes() as live:
        seen = []
        for state in engine.iter_step(ids()):
            seen.append(state.bytes_alive["fill_outputs"])
            assert live.current_by["fill_outputs"] == seen[-1]
        full = [2 * 12 * PER_TOKEN * chunks for chunks in range(CHUNKS)]
        assert seen == [*full[1:], *full[::-1]]
        engine.evaluate(ids())
        assert live.current_by["fill_outputs"] == 0
    with oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine:
        assert {state.bytes_alive["fill_outputs"] for state in engine.iter_step(ids())} == {0}


@pytest.mark.parametrize("halt", [1, 3, 4, 5])
def test_an_abandoned_step_frees_them(halt):
    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(**SIZES, keep_fill_outputs=True)
    with oomb.Engine(model, config) as engine, LiveBytes() as live:
        steps = engine.iter_step(ids())
        for _ in range(halt):
            next(steps)
        steps.close()
        assert live.current_by["fill_outputs"] == 0
        assert live.current == pytest.approx(0, abs=200)
