"""Chunk recurrence gives the gradients of the ordinary run: every parameter, in fp64."""

import pytest
import torch
from helpers import (
    CONFIGS,
    chunked_run,
    gradients,
    relative_error,
    tiny_model,
    true_fp64,
    twin_in_fp64,
    whole_run,
    worst_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import oomb

CHUNK, PAGE = 12, 4
CONFIG = {"chunk_size": CHUNK, "page_size": PAGE, "segment_pages": 2}
LENGTHS = [1, 2, PAGE - 1, PAGE, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + PAGE + 1, 61]


def assert_exact(ours, expected, bound=1e-10):
    """Loss and every gradient agree; a loss that is NaN must be NaN in both."""
    (loss, grads), (expected_loss, expected_grads) = ours, expected
    both_nan = bool(loss.isnan() and expected_loss.isnan())
    assert both_nan or relative_error(loss, expected_loss) <= bound
    error, name = worst_error(grads, expected_grads)
    assert error <= bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_family_at_every_length(family, tokens):
    model, ids = tiny_model(family), torch.randint(0, 97, (2, tokens))
    with true_fp64():
        assert_exact(chunked_run(model, ids, CONFIG), whole_run(model, ids))


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize("backend", ["reference", "library"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt_oss"])
def test_every_policy_on_every_backend(family, backend, policy):
    model, ids = tiny_model(family), torch.randint(0, 97, (2, 53))
    config = {**CONFIG, "activation_policy": policy, "attention_backend": backend}
    with true_fp64():
        assert_exact(chunked_run(model, ids, config), whole_run(model, ids))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 3), (6, 6, 1), (40, 8, 1), (64, 1, 64)])
def test_sizes_that_divide_nothing(sizes):
    chunk, page, segment = sizes
    model, ids = tiny_model("llama"), torch.randint(0, 97, (1, 37))
    config = {"chunk_size": chunk, "page_size": page, "segment_pages": segment}
    with true_fp64():
        assert_exact(chunked_run(model, ids, config), whole_run(model, ids))


@pytest.mark.parametrize("tokens", [5, CHUNK + 1, 53])
def test_fp32_within_1e5(tokens):
    for family in ("qwen2", "qwen3_moe"):
        model, ids = tiny_model(family, torch.float32), torch.randint(0, 97, (2, tokens))
        assert_exact(chunked_run(model, ids, CONFIG), whole_run(model, ids), bound=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_bf16_error_is_at_most_twice_transformers_own(family):
    """Over all parameters together, and for each one with an allowance for chance."""
    model, ids = tiny_model(family, torch.bfloat16), torch.randint(0, 97, (2, 203))
    twin = twin_in_fp64(model, family)
    _, ordinary = whole_run(model, ids)
    _, ours = chunked_run(model, ids, {"chunk_size": 48, "page_size": 16, "segment_pages": 2})
    with true_fp64():
        _, exact = whole_run(twin, ids)

    def total(grads):
        return sum(float((grads[name] - exact[name]).norm()) ** 2 for name in exact) ** 0.5

    assert total(ours) <= 2 * total(ordinary)
    for name in exact:
        allowed = 2 * relative_error(ordinary[name], exact[name]) + 1e-3
        assert relative_error(ours[name], exact[name]) <= allowed, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention_bias", [True, False])
def test_tied_embeddings_and_attention_bias(tied, attention_bias):
    model = tiny_model("llama", tie_word_embeddings=tied, attention_bias=attention_bias)
    ids = torch.randint(0, 97, (2, 41))
    with true_fp64():
        assert_exact(chunked_run(model, ids, CONFIG), whole_run(model, ids))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_query_heads_share_keys(heads):
    queries, keys = heads
    model = tiny_model(
        "llama",
        hidden_size=8 * queries,
        num_attention_heads=queries,
        num_key_value_heads=keys,
    )
    ids = torch.randint(0, 97, (1, 41))
    with true_fp64():
        assert_exact(chunked_run(model, ids, CONFIG), whole_run(model, ids))


@pytest.mark.parametrize("chunks", [1, 2, 3, 10])
@pytest.mark.parametrize("ignored", ["none", "some", "a whole chunk", "all but one"])
def test_ignored_labels_over_any_number_of_chunks(chunks, ignored):
    """The mean is over the whole sequence, never a mean of chunks' means."""
    tokens = CHUNK * chunks - 3
    model, ids = tiny_model("llama"), torch.randint(0, 97, (2, tokens))
    labels = ids.clone()
    if ignored == "some":
        labels[torch.rand(labels.shape) < 0.5] = -100
    elif ignored == "a whole chunk":
        labels[:, : CHUNK + 1] = -100
        labels[0, -1] = ids[0, -1]
    elif ignored == "all but one":
        labels[:] = -100
        labels[1, tokens // 2] = 5
    with true_fp64():
        assert_exact(
            chunked_run(model, ids, CONFIG, labels=labels), whole_run(model, ids, labels=labels)
        )


@pytest.mark.parametrize("as_tensor", [True, False])
def test_num_items_in_batch_replaces_the_mean(as_tensor):
    model, ids = tiny_model("llama"), torch.randint(0, 97, (2, 29))
    items = torch.tensor(77) if as_tensor else 77
    with true_fp64():
        assert_exact(
            chunked_run(model, ids, CONFIG, num_items_in_batch=items),
            whole_run(model, ids, num_items_in_batch=77),
        )


def test_labels_all_ignored_give_nan_and_zero_gradients_like_transformers():
    model, ids = tiny_model("llama"), torch.randint(0, 97, (1, 29))
    labels = torch.full_like(ids, -100)
    with true_fp64():
        loss, grads = chunked_run(model, ids, CONFIG, labels=labels)
        assert_exact((loss, grads), whole_run(model, ids, labels=labels))
    assert loss.isnan()
    assert not any(grad.any() for grad in grads.values())


def test_the_router_loss_is_over_the_whole_sequence_and_can_be_off():
    ids = torch.randint(0, 97, (2, 53))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    with true_fp64():
        for on in (True, False):
            for family in ("qwen3_moe", "gpt_oss"):
                model = tiny_model(family, output_router_logits=on)
                ours = chunked_run(model, ids, CONFIG, attention_mask=mask)
                assert_exact(ours, whole_run(model, ids, labels=labels, attention_mask=mask))


def test_evaluate_equals_the_loss_and_touches_no_gradient():
    for family in ("llama", "qwen3_moe", "gemma2"):
        model, ids = tiny_model(family), torch.randint(0, 97, (2, 53))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
        with true_fp64(), oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
            expected, _ = whole_run(model, ids, labels=labels)
            assert relative_error(engine.evaluate(ids, labels=labels), expected) < 1e-12
        assert all(p.grad is None for p in model.parameters())


def test_the_answer_does_not_depend_on_where_inputs_come_from():
    """int32 ids, and rows that are views."""
    model, ids = tiny_model("llama"), torch.randint(0, 97, (4, 41))
    with true_fp64():
        expected = chunked_run(model, ids[::2], CONFIG)
        assert_exact(chunked_run(model, ids.int()[::2], CONFIG), expected, bound=0)


def test_iter_step_shows_every_chunk_and_returns_the_result():
    model, ids = tiny_model("llama", torch.float32), torch.randint(0, 97, (1, 3 * CHUNK + 5))
    with oomb.Engine(model, oomb.EngineConfig(**CONFIG)) as engine:
        expected = engine.step(ids)
        grads = gradients(model)
        model.zero_grad()
        steps, states = engine.iter_step(ids), []
        while True:
            try:
                states.append(next(steps))
            except StopIteration as end:
                result = end.value
                break
    fill, sweep = [("fill", c) for c in (0, 1, 2)], [("sweep", c) for c in (3, 2, 1, 0)]
    assert [(state.phase, state.chunk) for state in states] == fill + sweep
    assert result.loss == expected.loss
    assert all(torch.equal(grads[name], g) for name, g in gradients(model).items())
    held = [int((state.page_table.slots >= 0).sum()) for state in states]
    assert held == [3, 6, 9, 9, 6, 3, 0]
    assert [state.page_table.terms[0, 0] for state in states] == [0, 0, 0, 1, 2, 3, 0]
    assert states[2].bytes_alive["kv_pages"] == 9 * PAGE * 2 * 2 * 2 * 8 * 4  # layers, K|V, heads
    assert states[2].bytes_alive["page_gradients"] == 0
    assert states[3].bytes_alive["page_gradients"] == states[3].bytes_alive["kv_pages"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    """Batches, lengths, padding, ignored labels, chunk, page and segment sizes, all at random."""
    page = data.draw(st.integers(1, 7), "page")
    chunk = page * data.draw(st.integers(1, 5), "pages per chunk")
    rows = data.draw(st.integers(1, 3), "rows")
    tokens = data.draw(st.integers(2, 40), "tokens")
    lengths = data.draw(st.lists(st.integers(1, tokens), min_size=rows, max_size=rows), "lengths")
    config = {
        "chunk_size": chunk,
        "page_size": page,
        "segment_pages": data.draw(st.integers(1, 6), "segment"),
        "attention_backend": data.draw(st.sampled_from(["reference", "library"])),
        "activation_policy": data.draw(st.sampled_from(["keep", "selective", "layer"])),
    }
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    ids = torch.randint(0, 97, (rows, tokens))
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape) < 0.2), -100)
    model = tiny_model("qwen2", num_hidden_layers=1)
    arguments = {"labels": labels, "attention_mask": mask, "num_items_in_batch": 7}
    with true_fp64():
        assert_exact(
            chunked_run(model, ids, config, **arguments), whole_run(model, ids, **arguments)
        )
