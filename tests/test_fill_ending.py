"""The fill's last layer ends with its pages, and only where nobody can tell."""

import pytest
import torch
from helpers import gradients, tiny_model, whole_run, worst_error

import oomb

SIZES = {"chunk_size": 16, "page_size": 8}
IDS = torch.arange(75)[None] * 7 % 97


def mlp_runs_in_fill(model, mlp=None, **config):
    """How often the last layer's MLP runs in the fill of five chunks, and the gradients."""
    runs = []
    mlp = mlp or model.model.layers[-1].mlp
    handle = mlp.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, **config)) as engine:
        runs.clear()
        engine.step(IDS)
    handle.remove()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return runs.count(False), found


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize("keep_outputs", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_later_chunks_end_early_with_the_same_gradients(family, policy, keep_outputs):
    model = tiny_model(family, torch.float32)
    _, expected = whole_run(model, IDS)
    runs, found = mlp_runs_in_fill(model, activation_policy=policy, keep_fill_outputs=keep_outputs)
    assert runs == 1
    assert worst_error(found, expected)[0] < 1e-5


@pytest.mark.parametrize(("dropout", "runs"), [(0.0, 1), (0.1, 4)])
def test_a_model_that_draws_random_numbers_runs_whole(dropout, runs):
    model = tiny_model("gpt2", torch.float32, resid_pdrop=dropout, attn_pdrop=0.0).train()
    assert mlp_runs_in_fill(model, model.transformer.h[-1].mlp)[0] == runs


def test_experts_are_counted_in_every_layer():
    model = tiny_model("qwen3_moe", torch.float32)
    model.config.output_router_logits = True
    assert mlp_runs_in_fill(model)[0] == 4
