"""Pages on two tiers: the same bits as on one, whatever the timing, and nothing left behind."""

from __future__ import annotations

import gc
import importlib.util
import threading
import weakref

import pytest
import torch
from helpers import gradients, tiny_model

import oomb
from oomb.offload import simulated, store
from oomb.offload.outputs import HostOutputs
from oomb.offload.ring import SegmentRing
from oomb.offload.simulated import SimulatedTier

SIZES = {"chunk_size": 12, "page_size": 4, "segment_pages": 2}
TOKENS = 53


def batch(kind: str = "plain", seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    if kind == "plain":
        return {"input_ids": ids}
    if kind in ("one row", "short row"):
        return {"input_ids": ids[:1] if kind == "one row" else ids[:1, :26]}
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 30:] = 0
    documents = torch.zeros(2, TOKENS, dtype=torch.int64)
    documents[0, 17:], documents[1, 2:] = 1, 1
    return {"input_ids": ids, "attention_mask": mask, "document_ids": documents}


def offload(**settings) -> oomb.OffloadConfig:
    return oomb.OffloadConfig(**{"poison": True, **settings})


def run(model, config: oomb.OffloadConfig | None, kind: str = "plain", steps: int = 1, **settings):
    """Loss of the last step, and gradients summed over all."""
    model.zero_grad()
    settings = oomb.EngineConfig(**{**SIZES, **settings}, offload=config)
    with oomb.Engine(model, settings) as engine:
        for number in range(steps):
            loss = engine.step(**batch(kind, number)).loss
        grads = gradients(model)
        model.zero_grad()
    return loss, grads


def same(a, b) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.fixture
def loads(monkeypatch):
    """Counts loads, and those that were not announced."""
    counts = {"all": 0, "unannounced": 0}
    take = SegmentRing._take

    def counted(self, load):
        before = self.unannounced
        taken = take(self, load)
        counts["all"] += 1
        counts["unannounced"] += self.unannounced - before
        return taken

    monkeypatch.setattr(SegmentRing, "_take", counted)
    return counts


# -- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "documents and padding"])
@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("mistral", {"sliding_window": 20}), ("qwen3_moe", {}), ("gpt2", {})],
)
def test_gradients_have_the_bits_of_one_tier(family, changes, policy, kind, loads):
    model = tiny_model(family, torch.float32, **changes)
    settings = {"activation_policy": policy, "attention_backend": "auto"}
    expected = run(model, None, kind, **settings)
    assert loads["all"] == 0
    assert same(run(model, offload(), kind, **settings), expected)
    assert loads["all"] > 50
    if kind == "plain":
        assert loads["unannounced"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"segment_pages": 1},
        {"segment_pages": 3},
        {"segment_pages": 100},
        {"keep_fill_outputs": True, "activation_policy": "layer"},
        {"live_chunks": 2, "activation_policy": "keep"},
        {"check_replay": True},
        {"page_grad_dtype": torch.float64},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
@pytest.mark.parametrize("ring_depth", [2, 5])
def test_settings_change_no_bit(settings, ring_depth, loads):
    model = tiny_model("qwen2", torch.float32)
    expected = run(model, None, **settings)
    assert same(run(model, offload(ring_depth=ring_depth), **settings), expected)
    assert loads["all"] > 0


@pytest.mark.parametrize("slots", [1, 3, 9])
def test_the_budget_keeps_the_earliest_segments(slots, loads):
    model = tiny_model("llama", torch.float32)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    per_layer = 2 * 8 * heads * dim * 4
    ring = (3 + 2) * per_layer + 3 * per_layer
    budget = ring + slots * 2 * 2 * per_layer
    expected = run(model, None)
    assert same(run(model, offload(gpu_budget=budget), steps=1), expected)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, offload=offload(gpu_budget=budget))) as e:
        steps = e.iter_step(**batch())
        states = [next(steps) for _ in range(4)]
        steps.close()
    table = states[-1].page_table
    order = [(page, row) for page in range(0, 12, 2) for row in (0, 1)]  # as they are written
    order.sort(key=lambda at: (at[0] * 4 // 12, at[1], at[0]))
    on_gpu = [not table.on_host[row, page] for page, row in order if table.slots[row, page] >= 0]
    assert on_gpu == [True] * slots + [False] * (len(on_gpu) - slots)
    alive = states[-1].bytes_alive
    assert alive["kv_pages"] == slots * 2 * per_layer
    assert alive["host_kv_pages"] == 2 * per_layer * on_gpu.count(False)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.slow
def test_triton_has_the_same_bits_when_deterministic(loads):
    model = tiny_model("llama", torch.float32, num_hidden_layers=1, head_dim=16)
    settings = {
        "attention_backend": "triton",
        "deterministic": True,
        "segment_pages": 1,
        "activation_policy": "keep",
    }
    expected = run(model, None, "short row", **settings)
    assert same(run(model, offload(), "short row", **settings), expected)
    assert loads["all"] > 0
    _, other = run(model, None, "short row", attention_backend="reference")
    for name, grad in expected[1].items():
        torch.testing.assert_close(grad, other[name], rtol=1e-4, atol=1e-6)


def test_a_budget_that_holds_all_needs_no_second_tier(loads):
    model = tiny_model("llama", torch.float32)
    expected = run(model, None)
    assert same(run(model, offload(gpu_budget=10**9)), expected)
    assert loads["all"] == 0


def test_steps_reuse_the_slabs_and_evaluate_needs_no_gradients():
    model = tiny_model("llama", torch.float32)
    expected = run(model, None, steps=3)
    assert same(run(model, offload(), steps=3), expected)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, offload=offload())) as engine:
        loss = engine.evaluate(**batch())
        keys_only = engine._store.nbytes
        assert torch.equal(engine.step(**batch()).loss, loss)
        both = engine._store.nbytes
        assert both == 2 * keys_only > 0
        engine.step(**{name: x[:, :30] for name, x in batch().items()})
        assert engine._store.nbytes == both
        engine.step(torch.cat([batch()["input_ids"]] * 2, 1))
        assert engine._store.nbytes > both
    assert engine._store.nbytes == 0


def test_odd_sizes_in_half_precision():
    """The log-sum-exp begins where its numbers may, whatever lies before it."""
    model = tiny_model("gpt2", torch.bfloat16, n_embd=33, n_head=3)
    ids = torch.randint(0, 97, (1, 17))
    grads = []
    for config in (None, offload()):
        settings = {"chunk_size": 5, "page_size": 5, "segment_pages": 1, "keep_fill_outputs": True}
        with oomb.Engine(model, oomb.EngineConfig(**settings, offload=config)) as engine:
            engine.step(ids)
            grads.append(gradients(model))
        model.zero_grad()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_memory_of_longer_texts_is_given_back_to_stay_within_the_budget():
    model = tiny_model("llama", torch.float32)
    ids = torch.randint(0, 97, (1, 122))
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, offload=offload())) as engine:
        budget = engine.reserve(61)
    config = oomb.EngineConfig(**SIZES, offload=offload(host_budget=budget))
    with oomb.Engine(model, config) as engine:
        engine.evaluate(ids)
        engine.step(ids[:, :61])
        assert engine.host_memory <= budget
        with pytest.raises(ValueError, match=r"this step needs \d+ bytes .* host_budget="):
            engine.step(ids)
        engine.step(ids[:, :61])


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("live", [1, 2])
def test_reserving_takes_what_the_step_takes(outputs, live, monkeypatch):
    model = tiny_model("llama", torch.float32)
    settings = {
        "keep_fill_outputs": outputs,
        "activation_policy": "keep",
        "live_chunks": live,
        "offload": offload(),
    }
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, **settings)) as engine:
        held = engine.reserve(TOKENS, rows=2)
        assert held == engine.host_memory > 0
        monkeypatch.setattr(SimulatedTier, "host_memory", None)  # the step needs no more
        engine.step(**batch())
        assert engine.host_memory == held
    assert engine.host_memory == 0
    with oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine:
        assert engine.reserve(TOKENS) == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.reserve(TOKENS)


def test_a_frozen_model_asks_for_less_than_was_announced(loads):
    """Only the last layer is trained: the backward ends there."""
    model = tiny_model("llama", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    expected = run(model, None)
    assert same(run(model, offload()), expected)


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("budget", [0, 10**9], ids=["pages on the host", "pages on the GPU"])
@pytest.mark.parametrize("kind", ["plain", "documents and padding"])
def test_fill_outputs_come_back_from_the_host(family, policy, budget, kind, monkeypatch):
    model = tiny_model(family, torch.float32)
    settings = {"activation_policy": policy, "keep_fill_outputs": True}
    expected = run(model, None, kind, steps=2, **settings)
    unannounced = []
    expect = HostOutputs.expect
    monkeypatch.setattr(
        HostOutputs,
        "expect",
        lambda self, chunk, layers: unannounced.append(not layers) or expect(self, chunk, layers),
    )
    assert same(run(model, offload(gpu_budget=budget), kind, steps=2, **settings), expected)
    assert unannounced and not any(unannounced)


def test_what_is_alive_says_where():
    model = tiny_model("llama", torch.float32)
    settings = {**SIZES, "keep_fill_outputs": True}
    alive = []
    for config in (offload(), offload(fill_outputs=False)):
        with oomb.Engine(model, oomb.EngineConfig(**settings, offload=config)) as engine:
            steps = engine.iter_step(**batch())
            for _ in range(3):
                state = next(steps)
            alive.append(state.bytes_alive)
            steps.close()
    on_host, on_gpu = alive
    assert "fill_outputs" not in on_host and "host_fill_outputs" not in on_gpu
    assert on_host["host_fill_outputs"] == on_gpu["fill_outputs"] > 0
    assert on_host["kv_pages"] == on_gpu["kv_pages"] == 0 < on_gpu["host_kv_pages"]


# -- races ----------------------------------------------------------------------------------------


class Forgetful(SimulatedTier):
    """Forgets to wait for one kind of thing in one kind of operation."""

    forgets = ("", "")

    def _remembered(self, operation, after):
        kinds = ["kernels" if done.copy is None else done.copy.kind for done in after]
        return [
            done
            for done, kind in zip(after, kinds, strict=True)
            if (operation, kind) != type(self).forgets
        ]

    def wait(self, after):
        super().wait(self._remembered("kernels", after))

    def copy_in(self, pairs, after, layer):
        return super().copy_in(pairs, self._remembered("copy_in", after), layer)

    def copy_out(self, pairs, after, layer):
        return super().copy_out(pairs, self._remembered("copy_out", after), layer)


def goes_wrong(monkeypatch, kind="plain", ring_depth=4, longest=1e-3, seeds=20) -> bool:
    """One layer and as many segments as chunks: nothing else orders the streams by chance."""
    model = tiny_model("llama", torch.float32, num_hidden_layers=1)
    settings = {"segment_pages": 3, "attention_backend": "library"}
    expected = run(model, None, kind, **settings)
    for seed in range(seeds):
        monkeypatch.setattr(
            store, "make_tier", lambda device, pinned, seed=seed: Forgetful(seed, longest)
        )
        if not same(run(model, offload(ring_depth=ring_depth), kind, **settings), expected):
            return True
    return False


def test_with_all_waits_no_seed_goes_wrong(monkeypatch):
    monkeypatch.setattr(Forgetful, "forgets", ("", ""))
    assert not goes_wrong(monkeypatch)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("kernels", "copy_in"),  # read a segment before it has come
        ("kernels", "copy_out"),  # write into a buffer that is still on its way out
        ("copy_in", "kernels"),  # overwrite a segment that is still read
        ("copy_in", "copy_out"),  # read host memory that is still to be written
        ("copy_out", "kernels"),  # send what is not computed yet
    ],
)
def test_every_wait_is_needed(operation, kind, monkeypatch):
    monkeypatch.setattr(Forgetful, "forgets", (operation, kind))
    assert goes_wrong(monkeypatch)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("kernels", "copy_in"),
        ("kernels", "copy_out"),
        ("copy_in", "kernels"),
        ("copy_in", "copy_out"),
        ("copy_out", "kernels"),
    ],
)
def test_every_wait_of_fill_outputs_is_needed(operation, kind, monkeypatch):
    monkeypatch.setattr(Forgetful, "forgets", (operation, kind))
    model = tiny_model("llama", torch.float32, num_hidden_layers=3)
    settings = {"keep_fill_outputs": True, "activation_policy": "keep"}
    expected = run(model, None, **settings)

    def differs(seed):
        monkeypatch.setattr(store, "make_tier", lambda device, pinned: Forgetful(seed, 2e-2))
        try:
            return not same(run(model, offload(gpu_budget=10**9), **settings), expected)
        except RuntimeError as error:  # autograd saw an output change after it was saved
            return "modified by an inplace operation" in str(error)

    assert any(differs(seed) for seed in range(20))


@pytest.mark.parametrize("content", ["keys", "gradients"])
def test_a_slot_is_read_after_it_was_written(content, monkeypatch):
    last_written = SegmentRing._last_written
    monkeypatch.setattr(
        SegmentRing,
        "_last_written",
        lambda self, what, load: [] if what == content else last_written(self, what, load),
    )
    # More buffers than loads of a chunk, so that a slot's next load does not wait for its buffer.
    assert goes_wrong(monkeypatch, "one row", ring_depth=9, longest=1e-2)


def test_a_buffer_is_loaded_after_its_gradients_have_left(monkeypatch):
    give_back = SegmentRing._return

    def forgetful(self, load, buffer, *, whole):
        before = buffer.free_after
        give_back(self, load, buffer, whole=whole)
        buffer.free_after = before

    monkeypatch.setattr(SegmentRing, "_return", forgetful)
    assert goes_wrong(monkeypatch)


# -- nothing is left ------------------------------------------------------------------------------


def threads() -> int:
    return sum(thread.name.startswith("oomb") for thread in threading.enumerate())


@pytest.mark.parametrize("when", [1, 3, 5, 8])
@pytest.mark.parametrize("how", ["closed", "raised"])
def test_an_abandoned_step_leaves_nothing(how, when, monkeypatch):
    model = tiny_model("llama", torch.float32)
    expected = run(model, None)
    rings = []
    announce = SegmentRing.announce
    monkeypatch.setattr(
        SegmentRing,
        "announce",
        lambda self, loads: rings.append(weakref.ref(self)) or announce(self, loads),
    )
    before = threads()
    engine = oomb.Engine(model, oomb.EngineConfig(**SIZES, offload=offload()))
    steps = engine.iter_step(**batch())
    for _ in range(when):
        next(steps)
    if how == "closed":
        steps.close()
    else:
        with pytest.raises(KeyError):
            steps.throw(KeyError("stop"))
    del steps
    gc.collect()
    assert rings and all(ring() is None for ring in rings)
    loss = engine.step(**batch()).loss
    grads = gradients(model)
    engine.close()
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(grads[name], expected[1][name]) for name in grads)
    assert threads() == before
    engine.close()


def test_an_engine_that_is_forgotten_gives_its_memory_back():
    before = threads()
    engine = oomb.Engine(
        tiny_model("llama", torch.float32), oomb.EngineConfig(**SIZES, offload=offload())
    )
    engine.step(**batch())
    assert threads() == before + 3
    del engine
    gc.collect()
    assert threads() == before


def test_a_copy_that_fails_is_told_and_the_engine_goes_on(monkeypatch):
    model = tiny_model("llama", torch.float32)
    expected = run(model, None)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, offload=offload())) as engine:
        copy, calls = simulated._copy, []

        def failing(pairs):
            calls.append(pairs)
            if len(calls) == 20:
                raise OSError("the bus is down")
            copy(pairs)

        monkeypatch.setattr(simulated, "_copy", failing)
        with pytest.raises(RuntimeError, match="a simulated stream failed"):
            engine.step(**batch())
        monkeypatch.setattr(simulated, "_copy", copy)
        loss = engine.step(**batch()).loss
    assert torch.equal(loss, expected[0])


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"gpu_budget": -1}, ValueError, "gpu_budget must be at least 0, got -1"),
        ({"gpu_budget": "1G"}, ValueError, "gpu_budget must be 'auto' or bytes, got '1G'"),
        ({"gpu_budget": 1.5}, TypeError, "gpu_budget must be an integer of 0 or more, got 1.5"),
        ({"gpu_budget": True}, TypeError, "gpu_budget must be"),
        ({"host_budget": 0}, ValueError, "host_budget must be at least 1, got 0"),
        ({"ring_depth": 1}, ValueError, "ring_depth must be at least 2, got 1"),
        ({"pinned": 1}, TypeError, "pinned must be True or False, got 1"),
    ],
)
def test_bad_settings_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        oomb.OffloadConfig(**settings)


def test_offload_must_be_its_config():
    with pytest.raises(TypeError, match=r"offload must be an oomb.OffloadConfig or None, got bool"):
        oomb.EngineConfig(offload=True)


def test_a_budget_smaller_than_the_ring_is_refused_with_numbers():
    model = tiny_model("llama", torch.float32)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES, offload=offload(gpu_budget=100))) as engine:
        with pytest.raises(
            ValueError, match=r"3 buffers of 8 tokens \(\d+ bytes\), got 100; raise"
        ):
            engine.step(**batch())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert engine._store.nbytes == 0


def test_too_little_host_memory_is_refused_with_numbers(monkeypatch):
    model = tiny_model("llama", torch.float32)
    config = oomb.EngineConfig(**SIZES, offload=offload(host_budget=1000))
    with oomb.Engine(model, config) as engine:
        with pytest.raises(ValueError, match="more than host_budget=1000 bytes"):
            engine.step(**batch())
        assert engine._store.nbytes == 0
    monkeypatch.setattr(store, "_spare_bytes", lambda: 5000)
    engine = oomb.Engine(model, oomb.EngineConfig(**SIZES, offload=offload()))
    with engine, pytest.raises(ValueError, match="GiB to spare; raise gpu_budget"):
        engine.step(**batch())
    # What a person states is not doubted: a virtual machine's memory may grow.
    config = oomb.EngineConfig(**SIZES, offload=offload(host_budget=10**9))
    with oomb.Engine(model, config) as engine:
        engine.step(**batch())
