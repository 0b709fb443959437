"""Stages: what an engine step shows to recorders and profilers."""

import importlib.util
import sys
import threading
from collections import Counter

import pytest
import torch
from helpers import tiny_model

import oomb
from oomb.profiling import Event, Recorder, stage
from oomb.profiling.event import KINDS
from oomb.profiling.place import Place, at_place
from oomb.profiling.timeline import Timeline

IDS = torch.arange(3, 23)[None]
SIZES = {"chunk_size": 8, "page_size": 4}


def engine_events(**changes):
    """Events of one step over 20 tokens in three chunks, two layers."""
    recorder = Recorder()
    model = tiny_model("qwen2", torch.float32)
    config = oomb.EngineConfig(recorder=recorder, **{**SIZES, **changes})
    with oomb.Engine(model, config) as engine:
        engine.step(IDS)
    return recorder


@pytest.mark.parametrize("kind", ["", "Attention", "softmax", None, 3])
def test_unknown_kinds_are_refused_with_those_that_are_known(kind):
    with (
        pytest.raises(ValueError, match="kind must be one of phase, chunk, layer") as refusal,
        stage(kind),
    ):
        pytest.fail("the body of a refused stage ran")
    assert repr(kind) in str(refusal.value)


def test_events_nest_and_carry_their_place():
    events = []
    with at_place(Place("fill", 3, Timeline(events.append))), stage("layer", 1):
        with stage("attention", 1):
            torch.randn(1000).sort()
        with stage("mlp", 1):
            pass
    assert [(e.kind, e.phase, e.chunk, e.layer, e.backward) for e in events] == [
        (kind, "fill", 3, 1, False) for kind in ("attention", "mlp", "layer")
    ]
    attention, mlp, layer = events
    assert attention.dur_ns > 0
    assert layer.t_ns <= attention.t_ns
    assert attention.t_ns + attention.dur_ns <= mlp.t_ns
    assert mlp.t_ns + mlp.dur_ns <= layer.t_ns + layer.dur_ns


def test_places_nest_and_end():
    outer, inner = [], []
    with at_place(Place("fill", 0, Timeline(outer.append))):
        with at_place(Place("sweep", 7, Timeline(inner.append))), stage("loss"):
            pass
        with at_place(Place("evaluate", 1)), stage("loss"):
            pass  # an engine without a recorder sends nothing to another's
        with stage("mlp"):
            pass
    with stage("mlp"):
        pass  # outside of a step nobody listens
    assert [(e.phase, e.chunk, e.kind) for e in inner] == [("sweep", 7, "loss")]
    assert [(e.phase, e.chunk, e.kind) for e in outer] == [("fill", 0, "mlp")]


def test_a_stage_that_raises_still_ends():
    events = []
    with (
        pytest.raises(KeyError),
        at_place(Place("fill", 0, Timeline(events.append))),
        stage("chunk"),
        stage("loss"),
    ):
        raise KeyError
    assert [event.kind for event in events] == ["loss", "chunk"]


class Marked(torch.autograd.Function):
    """The identity, with a stage in its backward that notes its thread."""

    threads: list = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with stage("attention", 5):
            Marked.threads.append(threading.get_ident())
            return grad


def test_stages_inside_backward_know_their_place_on_any_thread():
    """Autograd may run backward elsewhere, so the place is no thread's own."""
    events = []
    x = torch.ones(3, requires_grad=True)
    Marked.threads.clear()
    with at_place(Place("sweep", 2, Timeline(events.append))):
        loss = Marked.apply(x).sum()
        other = threading.Thread(target=loss.backward)
        other.start()
        other.join()
    assert Marked.threads == [other.ident] != [threading.get_ident()]
    (event,) = events
    assert event.dur_ns > 0
    assert event == Event(
        "attention", "sweep", 2, 5, event.t_ns, event.dur_ns, backward=True,
        enqueue_ns=event.enqueue_ns, number=0,
    )  # fmt: skip


# How often a stage of one layer and chunk of the sweep runs: forward, and inside backward.
RUNS = {
    "keep": {"attention": (1, 1), "projection": (1, 0), "mlp": (1, 0), "layer": (1, 0)},
    "selective": {"attention": (1, 1), "projection": (1, 1), "mlp": (1, 1), "layer": (1, 0)},
    "layer": {"attention": (1, 2), "projection": (1, 1), "mlp": (1, 1), "layer": (1, 0)},
}


@pytest.mark.parametrize("policy", RUNS)
def test_an_engine_step_shows_every_part(policy):
    """Also what is computed again: in backward, attention itself under the policy `layer` alone."""
    events = engine_events(activation_policy=policy).events
    counts = Counter((e.kind, e.phase, e.chunk, e.layer, e.backward) for e in events)
    expected = Counter({("phase", phase, None, None, False): 1 for phase in ("fill", "sweep")})
    for chunk in range(2):
        expected["chunk", "fill", chunk, None, False] = 1
        expected.update(
            (kind, "fill", chunk, layer, False) for kind in RUNS[policy] for layer in range(2)
        )
    for kind in ("attention", "mlp"):  # the fill's last layer needs pages only
        del expected[kind, "fill", 1, 1, False]
    for chunk in range(3):
        expected.update(
            [("chunk", "sweep", chunk, None, False), ("loss", "sweep", chunk, None, False)]
        )
        for layer in range(2):
            for kind, (forward, backward) in RUNS[policy].items():
                expected[kind, "sweep", chunk, layer, False] += forward
                expected[kind, "sweep", chunk, layer, True] += backward
    assert counts == +expected
    assert {event.step for event in events} == {0}
    for outer in (e for e in events if e.kind in ("phase", "chunk")):
        inside = [e for e in events if outer.t_ns <= e.t_ns < outer.t_ns + outer.dur_ns]
        assert all(e.t_ns + e.dur_ns <= outer.t_ns + outer.dur_ns for e in inside)


def test_spans_show_in_torch_profiler():
    model = tiny_model("qwen2", torch.float32)
    with (
        oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        engine.step(IDS)
    counts = {row.key: row.count for row in profile.key_averages() if row.key.startswith("oomb::")}
    assert counts["oomb::chunk"] == 5  # two filled, three swept
    assert counts["oomb::loss"] == 3
    # filled (the last layer only once), swept, and swept backward
    assert counts["oomb::attention"] == 2 * (2 + 3 + 3) - 1
    assert counts.keys() <= {f"oomb::{kind}" for kind in KINDS}


class FakeDomain:
    """What the stage needs of an NVTX domain."""

    def __init__(self):
        self.open, self.opened = [], []

    def get_event_attributes(self, message):
        return message

    def push_range(self, attributes):
        self.open.append(attributes)
        self.opened.append(attributes)

    def pop_range(self):
        self.open.pop()


def fresh_stage_module(monkeypatch, nvtx):
    """The module as imported where `nvtx` is what it is; the real one stays untouched."""
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    spec = importlib.util.find_spec("oomb.profiling.stage")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nvtx_is_optional(monkeypatch):
    module = fresh_stage_module(monkeypatch, None)  # None: importing it raises ImportError
    events = []
    with at_place(Place("fill", 0, Timeline(events.append))), module.stage("mlp", 2):
        pass
    assert [(event.kind, event.layer) for event in events] == [("mlp", 2)]


def test_nvtx_ranges_open_and_close_in_the_domain_oomb(monkeypatch):
    domain, asked = FakeDomain(), []

    class Nvtx:
        @staticmethod
        def get_domain(name):
            asked.append(name)
            return domain

    module = fresh_stage_module(monkeypatch, Nvtx)
    with pytest.raises(KeyError), module.stage("chunk"), module.stage("loss"):
        assert domain.open == ["chunk", "loss"]
        raise KeyError
    assert asked == ["oomb"]
    assert domain.open == []
    assert domain.opened == ["chunk", "loss"]


def test_steps_are_numbered_also_those_given_up():
    recorder = Recorder()
    model = tiny_model("qwen2", torch.float32)
    with oomb.Engine(model, oomb.EngineConfig(recorder=recorder, **SIZES)) as engine:
        engine.step(IDS)
        given_up = engine.iter_step(IDS)
        next(given_up)
        given_up.close()
        engine.step(IDS)
    counts = Counter(event.step for event in recorder.events)
    assert counts.keys() == {0, 1, 2}
    assert counts[0] == counts[2] > counts[1] > 0


def test_halted_steps_of_two_engines_stay_apart():
    """Neither the other's events, nor the caller's own stages, nor anything after the end."""
    recorders, running = [Recorder(), Recorder()], []
    for recorder, family in zip(recorders, ("qwen2", "llama"), strict=True):
        config = oomb.EngineConfig(recorder=recorder, **SIZES)
        running.append(oomb.Engine(tiny_model(family, torch.float32), config).iter_step(IDS))
    first, second = running
    next(first)
    next(second)
    with stage("optimizer"):
        pass
    for steps in (first, second):  # the first to begin is the first to end
        for _ in steps:
            pass
    with stage("optimizer"):
        pass
    alone = Counter((e.kind, e.phase, e.chunk, e.layer) for e in engine_events().events)
    for recorder in recorders:
        assert Counter((e.kind, e.phase, e.chunk, e.layer) for e in recorder.events) == alone
