"""What is alive during a step does not grow with the sequence, pages aside."""

import pytest
import torch
from helpers import tiny_model

import oomb
from oomb.profiling import LiveBytes

CHUNK = 1024


def peak_bytes(tokens, policy):
    """Peak live bytes by category during one step; gradients exist before it starts."""
    model = tiny_model(
        "llama",
        torch.float32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=1 << 16,
    )
    ids = torch.randint(0, 97, (1, tokens))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # a chunk to a segment: attention backward makes gradients of a whole segment at a time
    config = oomb.EngineConfig(
        chunk_size=CHUNK, page_size=128, segment_pages=CHUNK // 128, activation_policy=policy
    )
    with oomb.Engine(model, config) as engine, LiveBytes() as live:
        engine.step(ids)
    assert live.current == pytest.approx(0, abs=200), "something outlives the step"
    return dict(live.peak_by)


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_peak_at_32k_equals_peak_at_4k(policy):
    short, long = peak_bytes(4096, policy), peak_bytes(32768, policy)
    assert long["other"] == pytest.approx(short["other"], rel=0.01)
    # pages and nothing else grow, by exactly the tokens that later chunks read
    per_token = 2 * 32 * 4  # K and V, one head of 32 numbers in fp32
    assert short["kv_pages"] == short["page_gradients"] == (4096 - CHUNK) * per_token


def test_policies_keep_less_in_order():
    keep, selective, layer = (peak_bytes(4096, p)["other"] for p in ("keep", "selective", "layer"))
    assert keep > selective >= layer


def test_the_whole_run_grows_where_the_engine_does_not():
    """The other side of the comparison, so that a tracker which sees nothing cannot pass."""
    model = tiny_model("llama", torch.float32, num_hidden_layers=1, max_position_embeddings=8192)

    def whole(tokens):
        ids = torch.randint(0, 97, (1, tokens))
        with LiveBytes() as live:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return live.peak

    assert whole(4096) > 3.5 * whole(1024)
