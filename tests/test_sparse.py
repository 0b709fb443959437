"""Attention over chosen pages: what was chosen becomes the mask of a whole run in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import chunked_run, relative_error, tiny_model, true_fp64, whole_run, worst_error
from transformers import AttentionInterface

import oomb
from oomb.chunking import Chunk, Read
from oomb.sparse import Selection, Selector, selector

CHUNK, PAGE, TOKENS = 12, 4, 61  # the last chunk, of one token, may read 15 pages
SIZES = {"chunk_size": CHUNK, "page_size": PAGE, "segment_pages": 2}
DOCUMENTS = {
    "at chunk borders": ([0, 24], [0, 36]),
    "anywhere": ([0, 5, 50], [0, 23]),
    "inside pages": ([0, 1, 7], [0, 30, 33]),
}


def sparse(budget: int, **changes) -> oomb.SparseConfig:
    return oomb.SparseConfig(budget=budget, **changes)


def ids(rows: int = 1, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, 97, (rows, tokens))


def document_ids(starts: tuple[list[int], ...], tokens: int = TOKENS) -> torch.Tensor:
    at = torch.arange(tokens)
    return torch.stack([(at[:, None] >= torch.tensor(each)).sum(1) for each in starts])


@pytest.fixture
def asked(monkeypatch) -> list[tuple[Chunk, int, dict[Read, Selection]]]:
    """Every answer that a selector gives: chunk, layer, and what its reads have chosen."""
    answers = []
    choose = Selector.choose

    def watched(self, chunk, layer, q):
        found = choose(self, chunk, layer, q)
        if self._config is not None:  # the engine's own probe is dense
            answers.append((chunk, layer, found))
        return found

    monkeypatch.setattr(Selector, "choose", watched)
    return answers


# -- the oracle -----------------------------------------------------------------------------------


def seen_by_heads(answers, layer: int, documents: torch.Tensor, groups: int) -> torch.Tensor:
    """Bool [B, groups, N, N]: the causal mask of documents, less pages that were not chosen.

    Written from the meaning of a selection alone: a document's history, in pages of its own, ends
    where the chunk begins; a query sees the pages its block chose and all that is no complete page.
    """
    at = torch.arange(documents.shape[1])
    seen = (documents[:, :, None] == documents[:, None]) & (at[:, None] >= at)
    seen = seen[:, None].repeat(1, groups, 1, 1)
    for chunk, number, selections in answers:
        if number != layer:
            continue
        for read, selection in selections.items():
            document = documents[read.row, chunk.start]
            begin = int((documents[read.row] == document).nonzero()[0])
            complete = (chunk.start - begin) // PAGE
            assert selection.count == complete
            for query in range(chunk.start + read.start, chunk.start + read.stop):
                block = (query - chunk.start) // selection.block
                chosen = selection.pages[:, block].expand(groups, -1).tolist()
                for group, pages in enumerate(chosen):
                    assert len(set(pages)) == len(pages) and max(pages) < complete
                    for page in set(range(complete)) - set(pages):
                        hidden = slice(begin + page * PAGE, begin + (page + 1) * PAGE)
                        seen[read.row, group, query, hidden] = False
    return seen


def oracle(model, tokens, answers, documents=None, **arguments):
    """Loss and gradients of the whole run under the mask that `answers` make."""
    documents = torch.zeros_like(tokens) if documents is None else documents

    def attention(module, q, k, v, mask, scaling, dropout=0.0, sliding_window=None, **keywords):
        groups = k.shape[1]
        seen = seen_by_heads(answers, module.layer_idx, documents, groups)
        if sliding_window is not None:
            at = torch.arange(tokens.shape[1])
            seen = seen & (at[:, None] - at < sliding_window)
        k, v, seen = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v, seen))
        scores = (q @ k.mT * scaling).masked_fill(~seen, float("-inf"))
        if keywords.get("s_aux") is not None:
            sinks = keywords["s_aux"][:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        return (scores.softmax(-1)[..., : v.shape[2]] @ v).transpose(1, 2).contiguous(), None

    labels, first = tokens.clone(), torch.ones_like(tokens, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    labels[first] = -100
    at = torch.arange(tokens.shape[1]).expand_as(tokens)
    arguments["position_ids"] = at - at.where(first, 0).cummax(1).values
    AttentionInterface.register("chosen", attention)
    before = model.config._attn_implementation
    model.set_attn_implementation("chosen")
    try:
        return whole_run(model, tokens, labels=labels, **arguments)
    finally:
        model.set_attn_implementation(before)


def assert_exact(ours, expected, bound=1e-10):
    assert relative_error(ours[0], expected[0]) <= bound
    error, name = worst_error(ours[1], expected[1])
    assert error <= bound, f"{name}: {error:.1e}"


def assert_is_its_own_mask(model, tokens, config, asked, documents=None, differs=True):
    """A sparse step equals the whole run under the mask of what it chose, and not the dense one."""
    given = {} if documents is None else {"document_ids": documents}
    with true_fp64():
        ours = chunked_run(model, tokens, {**SIZES, **config}, **given)
        assert_exact(ours, oracle(model, tokens, asked, documents))
        assert_exact(
            chunked_run(model, tokens, {**SIZES, **config, "sparse": None}, **given),
            dense := oracle(model, tokens, [], documents),
        )
    assert (relative_error(ours[0], dense[0]) > 1e-6) == differs
    return ours


# -- the proofs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 3])
@pytest.mark.parametrize("heads", ["shared", "kv_head"])
@pytest.mark.parametrize("granularity", ["query_page", "chunk"])
@pytest.mark.parametrize("summary", ["mean", "minmax"])
def test_few_of_twelve_pages(budget, summary, granularity, heads, asked):
    choice = sparse(budget, summary=summary, granularity=granularity, heads=heads)
    model, tokens = tiny_model("llama"), ids(tokens=60)
    assert_is_its_own_mask(model, tokens, {"sparse": choice}, asked)
    last = [found for chunk, _, found in asked if chunk.index == 4 and found]
    for selection in last[0].values():
        assert selection.count == 12
        blocks = 3 if granularity == "query_page" else 1
        assert selection.pages.shape == (2 if heads == "kv_head" else 1, blocks, budget)


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"keep_fill_outputs": True},
        {"segment_pages": 1},
        {"segment_pages": 100},
        {"check_replay": True, "deterministic": True},
    ],
    ids=str,
)
def test_every_policy(policy, extra, asked):
    model, tokens = tiny_model("qwen2"), ids(rows=2)
    config = {**extra, "activation_policy": policy, "sparse": sparse(2)}
    assert_is_its_own_mask(model, tokens, config, asked)


@pytest.mark.parametrize("live", [2, 3, 9])
def test_live_chunks_choose_in_their_only_forward(live, asked):
    model, tokens = tiny_model("llama"), ids()
    config = {"activation_policy": "keep", "live_chunks": live, "sparse": sparse(2)}
    assert_is_its_own_mask(model, tokens, config, asked)


@pytest.mark.parametrize("tokens", [13, 25, 50, 58])
def test_any_length(tokens, asked):
    """From a history of fewer pages than the budget on; the last page is partial."""
    model = tiny_model("llama")
    config = {"sparse": sparse(4)}
    assert_is_its_own_mask(model, ids(2, tokens), config, asked, differs=tokens > 3 * CHUNK)


@pytest.mark.parametrize("kept", [{"keep_first": 1}, {"keep_recent": 2}])
def test_kept_pages_are_read_whatever_their_votes(kept, asked):
    assert_is_its_own_mask(tiny_model("llama"), ids(), {"sparse": sparse(3, **kept)}, asked)
    chosen = [each for *_, found in asked for each in found.values()]
    assert chosen
    for each in chosen:
        first, recent = kept.get("keep_first", 0), kept.get("keep_recent", 0)
        assert (each.pages[..., :first] == torch.arange(first)).all()
        back = each.pages[..., each.pages.shape[-1] - recent :]
        assert (back == torch.arange(each.count - recent, each.count)).all()


@pytest.mark.parametrize("budget", [15, 16, 1000])
def test_a_budget_of_all_pages_is_dense_to_the_bit(budget):
    model, tokens = tiny_model("llama"), ids(rows=2)
    config = {**SIZES, "attention_backend": "reference"}
    loss, grads = chunked_run(model, tokens, {**config, "sparse": sparse(budget)})
    dense_loss, dense = chunked_run(model, tokens, config)
    assert torch.equal(loss, dense_loss)
    assert all(torch.equal(grads[name], dense[name]) for name in dense)


@pytest.mark.parametrize("heads", ["shared", "kv_head"])
@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("policy", ["selective", "layer"])
def test_packed_documents(starts, heads, policy, asked):
    documents = document_ids(starts)
    config = {"sparse": sparse(2, heads=heads), "activation_policy": policy}
    assert_is_its_own_mask(tiny_model("llama"), ids(rows=2), config, asked, documents)


def test_random_documents(asked):
    model = tiny_model("qwen2")
    for _ in range(12):
        asked.clear()
        documents = (torch.rand(2, TOKENS) < 0.04).cumsum(1)
        config = {**SIZES, "sparse": sparse(1)}
        tokens = ids(rows=2)
        with true_fp64():
            ours = chunked_run(model, tokens, config, document_ids=documents)
            assert_exact(ours, oracle(model, tokens, asked, documents))


def test_padding(asked):
    model, tokens = tiny_model("llama"), ids(rows=2)
    mask = torch.ones_like(tokens)
    mask[1, 41:] = 0
    with true_fp64():
        ours = chunked_run(model, tokens, {**SIZES, "sparse": sparse(2)}, attention_mask=mask)
        answers = list(asked)
        short = [(c, n, {r: s for r, s in f.items() if r.row == 1}) for c, n, f in answers]
        assert any(found for *_, found in short)
        parts = []
        for row, length in ((0, TOKENS), (1, 41)):
            here = [
                (c, n, {Read(0, r.start, r.stop, r.first, r.last): s for r, s in f.items()
                        if r.row == row})
                for c, n, f in answers
            ]  # fmt: skip
            parts.append(oracle(model, tokens[row : row + 1, :length], here))
    counts = torch.tensor([TOKENS - 1, 40], dtype=torch.float64)
    shares = counts / counts.sum()
    loss = sum(share * part[0] for share, part in zip(shares, parts, strict=True))
    grads = {
        name: sum(share * part[1][name] for share, part in zip(shares, parts, strict=True))
        for name in ours[1]
    }
    assert_exact(ours, (loss, grads))


@pytest.mark.parametrize("window", [6, 40, 4096])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_local_layers_keep_their_windows(family, window, asked):
    """Also where a window is longer than the rows; sinks and the router's loss included."""
    model = tiny_model(family, sliding_window=window)
    local = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert sorted(local) == [False, True]
    assert_is_its_own_mask(model, ids(rows=2), {"sparse": sparse(2)}, asked)
    for _, layer, found in asked:
        assert not (local[layer] and found)


def test_a_bf16_model_is_near_its_own_mask(asked):
    model, tokens = tiny_model("llama", torch.bfloat16), ids(rows=2)
    ours = chunked_run(model, tokens, {**SIZES, "sparse": sparse(2)})
    expected = oracle(model, tokens, asked)
    assert relative_error(ours[0], expected[0]) < 0.02
    error, name = worst_error(ours[1], expected[1])
    assert error < 0.1, f"{name}: {error:.1e}"
    dense = oracle(model, tokens, [])
    assert worst_error(ours[1], dense[1])[0] > 0.1


# -- what is chosen when --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_the_sweep_reads_what_the_fill_chose(policy, asked, monkeypatch):
    chosen = []
    select = selector.select_pages
    monkeypatch.setattr(
        selector, "select_pages", lambda *a, **k: chosen.append(select(*a, **k)) or chosen[-1]
    )
    config = {**SIZES, "activation_policy": policy, "sparse": sparse(2)}
    chunked_run(tiny_model("llama"), ids(rows=2), config)
    assert len(chosen) == 2 * 2 * 5  # rows, layers, chunks with a history: nothing is chosen twice
    by_place = {}
    for chunk, layer, found in asked:
        if chunk.reads:
            assert by_place.setdefault((chunk.index, layer), found) is found
    forwards = len([each for each in asked if each[0].index == 3])
    assert forwards == 2 * (2 if policy == "keep" else 3)  # fill, sweep, and again in its backward


def test_the_same_ties_every_run(asked):
    """With keys that are all alike every page has the same votes, and the lowest win."""
    model, tokens = tiny_model("llama"), torch.full((1, TOKENS), 5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
    runs = []
    for _ in range(3):
        asked.clear()
        runs.append(chunked_run(model, tokens, {**SIZES, "sparse": sparse(2)}))
        chosen = [each for *_, found in asked for each in found.values()]
        assert chosen and all((each.pages == torch.tensor([0, 1])).all() for each in chosen)
    for loss, grads in runs[1:]:
        assert torch.equal(loss, runs[0][0])
        assert all(torch.equal(grads[name], runs[0][1][name]) for name in grads)


def test_evaluate_is_the_loss_of_a_step():
    model, tokens = tiny_model("llama"), ids(rows=2)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, sparse=sparse(2))) as engine:
        loss = engine.evaluate(tokens)
        assert torch.equal(loss, engine.step(tokens).loss)
        dense = chunked_run(model, tokens, SIZES)[0]
    assert abs(float(loss - dense)) > 1e-6


# -- what it takes --------------------------------------------------------------------------------


def test_bytes_of_summaries_and_selections():
    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(**SIZES, sparse=sparse(2, summary="minmax", heads="kv_head"))
    with oomb.Engine(model, config) as engine:
        for state in engine.iter_step(ids()):
            alive = state.bytes_alive
            pages, chunk = 15, state.chunk
            in_fill = state.phase == "fill"
            summaries = 2 * pages * 2 * 16 * 4  # layers, pages, heads, least and most, fp32
            assert alive["page_summaries"] == (summaries if in_fill else 0)
            chose = range(1, chunk + 1) if in_fill else range(1, chunk)
            blocks = sum(math.ceil(CHUNK / PAGE) for _ in chose)
            assert alive["selections"] == 2 * 2 * blocks * 2 * 4  # layers, heads, budget, int32


@pytest.mark.parametrize("halt", [0, 3, 5, 7])
def test_an_abandoned_step_leaves_nothing(halt):
    model, tokens = tiny_model("llama", torch.float32), ids()
    config = oomb.EngineConfig(**SIZES, sparse=sparse(2))
    with oomb.Engine(model, config) as engine:
        with oomb.profiling.LiveBytes() as live:
            steps = engine.iter_step(tokens)
            for _ in range(halt + 1):
                next(steps)
            assert live.current_by["selections"] + live.current_by["page_summaries"] > 0
            steps.close()
            del steps
            assert live.current_by["selections"] == live.current_by["page_summaries"] == 0
        assert all(p.grad is None for p in model.parameters())
        again = engine.step(tokens).loss
    assert torch.equal(again.double(), chunked_run(model, tokens, config)[0])


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"sparse": 64}, TypeError, "sparse must be an oomb.SparseConfig or None, got int"),
        ({"offload": oomb.OffloadConfig()}, ValueError, "offload=.*sparse=None"),
        ({"page_dtype": "fp8"}, ValueError, "page_dtype='fp8'.*page_dtype=None"),
        ({"page_grad_dtype": torch.bfloat16}, ValueError, "page_grad_rounding='nearest'"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(settings, error, words):
    with pytest.raises(error, match=words):
        oomb.EngineConfig(**{"sparse": sparse(2), **settings})


@pytest.mark.parametrize("backend", ["library", "triton"])
def test_backends_without_sparse_attention(backend):
    config = oomb.EngineConfig(attention_backend=backend, sparse=sparse(2))
    with pytest.raises(ValueError, match=f"'{backend}' cannot run.*no sparse.*'reference'"):
        oomb.Engine(tiny_model("llama", torch.float32), config)


def test_models_whose_layers_are_all_local():
    with pytest.raises(ValueError, match=r"sparse must be None for Mistral.*all local by design"):
        oomb.Engine(tiny_model("mistral", sliding_window=8), oomb.EngineConfig(sparse=sparse(2)))


def test_auto_says_what_it_chose(caplog):
    with caplog.at_level("INFO", logger="oomb"):
        engine = oomb.Engine(tiny_model("llama"), oomb.EngineConfig(sparse=sparse(2)))
    assert engine.attention_backend == "reference"
    assert "chose 'reference' (not 'library': it has no sparse attention" in caplog.text
