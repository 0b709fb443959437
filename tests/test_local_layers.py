"""Models whose layers are local by design: windows, sinks, and what streams from the host."""

from collections import Counter

import pytest
import torch
from helpers import (
    chunked_run,
    relative_error,
    tiny_model,
    true_fp64,
    whole_run,
    worst_error,
)

import oomb
from oomb.offload.ring import SegmentRing

TOKENS = 45
CHUNK, PAGE, SEGMENT_PAGES = 12, 4, 2
SIZES = {"chunk_size": CHUNK, "page_size": PAGE, "segment_pages": SEGMENT_PAGES}
FAMILIES = {  # which layers are local
    "mistral": {},  # every
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},  # from a number on
    "qwen3": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma2": {},  # every other, as in those below
    "gemma3": {},
    "gpt_oss": {},
}
OFFLOAD = oomb.OffloadConfig(poison=True)
SINKS = "model.layers.0.self_attn.sinks"


def local_model(family, window, dtype=torch.float64, **changes):
    return tiny_model(family, dtype, sliding_window=window, **FAMILIES[family], **changes)


def ids(rows=2, tokens=TOKENS):
    return torch.randint(0, 97, (rows, tokens))


def assert_exact(ours, expected, bound=1e-10):
    assert relative_error(ours[0], expected[0]) <= bound
    error, name = worst_error(ours[1], expected[1])
    assert error <= bound, f"{name}: {error:.1e}"


# -- exactly what transformers computes -----------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 6, CHUNK, CHUNK + 1, 40, TOKENS - 1, TOKENS, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_mean_what_transformers_means(family, window):
    model, tokens = local_model(family, window), ids()
    with true_fp64():
        expected = whole_run(model, tokens)
        assert_exact(chunked_run(model, tokens, SIZES), expected)
        assert_exact(chunked_run(model, tokens, {**SIZES, "offload": OFFLOAD}), expected)


@pytest.mark.parametrize("sizes", [(3, 1, 2), (10, 5, 1), (7, 7, 3), (64, 8, 1)], ids=str)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_windows_and_sizes_that_divide_nothing(family, sizes):
    model, tokens = local_model(family, 9), ids(rows=1, tokens=29)
    config = dict(zip(SIZES, sizes, strict=True))
    with true_fp64():
        expected = whole_run(model, tokens)
        for offload in (None, OFFLOAD):
            assert_exact(chunked_run(model, tokens, {**config, "offload": offload}), expected)


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize("offload", [None, OFFLOAD], ids=["resident", "offloaded"])
def test_gpt_oss_with_padding_and_kept_outputs(offload, policy):
    model, tokens = local_model("gpt_oss", 7), ids()
    mask = torch.ones_like(tokens)
    mask[1, 20:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    config = {
        **SIZES,
        "offload": offload,
        "activation_policy": policy,
        "keep_fill_outputs": True,
    }
    with true_fp64():
        expected = whole_run(model, tokens, labels=labels, attention_mask=mask)
        assert_exact(chunked_run(model, tokens, config, attention_mask=mask), expected)


def test_packed_documents_have_the_sinks_to_themselves():
    model, tokens = local_model("gpt_oss", 7, output_router_logits=False), ids(rows=1)
    documents = torch.zeros_like(tokens)
    documents[0, 17:] = 1
    with true_fp64():
        both = [whole_run(model, tokens[:, at]) for at in (slice(17), slice(17, None))]
        ours = chunked_run(model, tokens, SIZES, document_ids=documents)
    counts = torch.tensor([16, TOKENS - 18], dtype=torch.float64)
    share = counts / counts.sum()
    expected = {
        name: share[0] * both[0][1][name] + share[1] * both[1][1][name] for name in both[0][1]
    }
    assert_exact(ours, (share[0] * both[0][0] + share[1] * both[1][0], expected))


# -- a sink's gradient is a parameter's gradient --------------------------------------------------


def test_the_gradient_of_bf16_sinks_is_fp32_and_never_rounded():
    """One chunk and one term: rounding to bf16 on the way would show."""
    model, tokens = local_model("gpt_oss", 7, torch.bfloat16), ids(rows=1, tokens=11)
    _, grads = chunked_run(model, tokens, SIZES)
    assert not torch.equal(grads[SINKS], grads[SINKS].bfloat16().double())
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, grad_dtype=torch.bfloat16)) as engine:
        engine.step(tokens)
        sinks = model.model.layers[0].self_attn.sinks
        assert sinks.grad.dtype == torch.bfloat16
        assert torch.equal(sinks.grad.double(), grads[SINKS].bfloat16().double())


def test_a_hook_of_the_sinks_fires_once_and_two_steps_add():
    model, tokens = local_model("gpt_oss", 7, torch.float32), ids()
    sinks, seen = model.model.layers[0].self_attn.sinks, []
    sinks.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine:
        engine.step(tokens)
        engine.step(tokens)
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], 2 * seen[0], rtol=1e-5, atol=0)


def test_frozen_sinks_stay_so_and_cost_the_others_nothing():
    model, tokens = local_model("gpt_oss", 7), ids()
    with true_fp64():
        _, expected = whole_run(model, tokens)
        for layer in model.model.layers:
            layer.self_attn.sinks.requires_grad_(False)
        _, grads = chunked_run(model, tokens, SIZES)
    assert not any("sinks" in name for name in grads)
    error, name = worst_error(grads, {name: expected[name] for name in grads})
    assert error < 1e-10, name


def test_sinks_of_minus_infinity_are_none():
    model, tokens = local_model("gpt_oss", 7), ids()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks[1:] = float("-inf")
    with true_fp64():
        assert_exact(chunked_run(model, tokens, SIZES), whole_run(model, tokens))


# -- what streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 6, 21])
@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_local_layers_stream_only_the_segments_their_window_reaches(family, window, monkeypatch):
    """Loads of each layer, those made ahead included: keys in the fill, both in the sweep."""
    loads, load_one = Counter(), SegmentRing._load

    def counted(self, load):
        if load.keys:
            loads[load.layer, load.slot, load.gradients] += 1
        return load_one(self, load)

    monkeypatch.setattr(SegmentRing, "_load", counted)
    model = local_model(family, window, torch.float32)
    settings = {**SIZES, "activation_policy": "selective", "offload": OFFLOAD}
    chunked_run(model, ids(rows=1), settings)

    expected, segment = Counter(), PAGE * SEGMENT_PAGES
    local = {0, 1} if family == "mistral" else {0}
    for start in range(CHUNK, TOKENS, CHUNK):
        for layer in (0, 1):
            first = max(start - window + 1, 0) if layer in local else 0
            seen = {token // segment for token in range(first, start)}
            filled = start + CHUNK < TOKENS  # the last chunk has no fill, and where no router
            filled &= layer == 0 or family == "gpt_oss"  # counts, it ends before the last attention
            for number in seen:
                expected[layer, number, False] += 1 + filled
                expected[layer, number, True] += 1
    assert loads == expected
