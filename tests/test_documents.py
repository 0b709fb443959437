"""Packed documents and padding: no token sees another document, positions restart."""

import itertools

import pytest
import torch
from helpers import chunked_run, gradients, tiny_model, true_fp64, whole_run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exactness import CONFIG, assert_exact


def each_document_alone(model, ids, documents, labels):
    """The definition: run every document by itself and divide by all counted labels."""
    pieces = []
    for row in range(len(ids)):
        edges = (documents[row, 1:] != documents[row, :-1]).nonzero().flatten() + 1
        cuts = [0, *edges.tolist(), ids.shape[1]]
        pieces += [(row, a, b) for a, b in itertools.pairwise(cuts)]
    count = sum(int((labels[row, a + 1 : b] != -100).sum()) for row, a, b in pieces)
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for row, a, b in pieces:
        piece, wanted = ids[row : row + 1, a:b], labels[row : row + 1, a:b]
        loss = model(input_ids=piece, labels=wanted, num_items_in_batch=count, use_cache=False).loss
        loss.backward()
        total += loss.detach()
    grads = gradients(model)
    model.zero_grad(set_to_none=True)
    return total, grads


def random_batch(density, rows=2, tokens=61):
    ids = torch.randint(0, 97, (rows, tokens))
    documents = (torch.rand(rows, tokens) < density).cumsum(1)
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    return ids, documents, labels


@pytest.mark.parametrize("density", [0.0, 0.02, 0.05, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("backend", ["reference", "library"])
def test_documents_equal_each_alone(density, backend):
    """From documents longer than several chunks to documents of one token."""
    model = tiny_model("qwen2")
    ids, documents, labels = random_batch(density)
    if density == 1.0:
        labels[0, 0] = 1
        documents[0, :2] = documents[0, 1]  # one pair of tokens, so that one label counts
        labels[0, 1] = 3
    with true_fp64():
        expected = each_document_alone(model, ids, documents, labels)
        ours = chunked_run(
            model,
            ids,
            {**CONFIG, "attention_backend": backend},
            document_ids=documents,
            labels=labels,
        )
    assert_exact(ours, expected)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_do_not_reach_into_another_document(family):
    model = tiny_model(family, sliding_window=7)
    ids, documents, labels = random_batch(0.05)
    with true_fp64():
        expected = each_document_alone(model, ids, documents, labels)
        ours = chunked_run(model, ids, CONFIG, document_ids=documents, labels=labels)
    assert_exact(ours, expected)


def test_restarting_positions_are_documents_as_in_transformers():
    model = tiny_model("qwen2")
    ids = torch.randint(0, 97, (2, 61))
    positions = torch.arange(61).repeat(2, 1)
    positions[:, 17:] -= 17
    positions[1, 40:] -= 23
    labels = ids.clone()
    labels[:, 17] = labels[1, 40] = -100
    with true_fp64():
        expected = whole_run(model, ids, labels=labels, position_ids=positions)
        assert_exact(chunked_run(model, ids, CONFIG, position_ids=positions), expected)
        documents = (positions == 0).cumsum(1)
        assert_exact(chunked_run(model, ids, CONFIG, document_ids=documents), expected)


def test_one_row_of_positions_serves_the_batch_and_may_start_anywhere():
    model = tiny_model("qwen2")
    ids, positions = torch.randint(0, 97, (2, 41)), torch.arange(7, 48)[None]
    with true_fp64():
        expected = whole_run(model, ids, position_ids=positions)
        assert_exact(chunked_run(model, ids, CONFIG, position_ids=positions), expected)


@pytest.mark.parametrize("lengths", [(61, 61), (61, 1), (13, 12), (40, 59), (1, 2)])
def test_right_padding(lengths):
    model, ids = tiny_model("qwen2"), torch.randint(0, 97, (2, 61))
    mask = (torch.arange(61) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    with true_fp64():
        expected = whole_run(model, ids, labels=labels, attention_mask=mask)
        assert_exact(chunked_run(model, ids, CONFIG, attention_mask=mask), expected)
        assert_exact(chunked_run(model, ids, CONFIG, attention_mask=mask.bool()), expected)


def test_what_lies_under_padding_does_not_matter():
    model, ids = tiny_model("qwen2"), torch.randint(0, 97, (2, 61))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    other = ids.masked_fill(mask == 0, 96)
    with true_fp64():
        expected = chunked_run(model, ids, CONFIG, attention_mask=mask)
        assert_exact(chunked_run(model, other, CONFIG, attention_mask=mask), expected, bound=0)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_packing(data):
    """Document edges anywhere, chunk, page and segment sizes at random."""
    page = data.draw(st.integers(1, 6), "page")
    config = {
        "chunk_size": page * data.draw(st.integers(1, 4), "pages per chunk"),
        "page_size": page,
        "segment_pages": data.draw(st.integers(1, 5), "segment"),
        "attention_backend": data.draw(st.sampled_from(["reference", "library"])),
    }
    tokens = data.draw(st.integers(3, 36), "tokens")
    edges = data.draw(st.lists(st.booleans(), min_size=2 * tokens, max_size=2 * tokens), "edges")
    torch.manual_seed(data.draw(st.integers(0, 1000), "seed"))
    ids = torch.randint(0, 97, (2, tokens))
    documents = torch.tensor(edges).view(2, tokens).cumsum(1)
    documents[:, 1] = documents[:, 0]  # at least one label counts
    documents = documents + (documents.cummax(1).values - documents)
    model = tiny_model("qwen2", num_hidden_layers=1)
    with true_fp64():
        expected = each_document_alone(model, ids, documents, ids)
        assert_exact(chunked_run(model, ids, config, document_ids=documents), expected)
