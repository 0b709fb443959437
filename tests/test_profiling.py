"""Stages: what an engine step shows to recorders and profilers."""

import importlib.util
import sys
import threading
import timeit
from collections import Counter

import pytest
import torch
from helpers import tiny_model

import oomb
from oomb.profiling import Event, Recorder, stage
from oomb.profiling.event import KINDS
from oomb.profiling.place import Place, at_place
from oomb.profiling.stage import Stage
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
    "keep": {"attention": (1, 1), "projection": (1, 1), "mlp": (1, 1), "layer": (1, 1)},
    "selective": {"attention": (1, 1), "projection": (1, 2), "mlp": (1, 2), "layer": (1, 1)},
    "layer": {"attention": (1, 2), "projection": (1, 2), "mlp": (1, 2), "layer": (1, 1)},
}
CONTAINERS = {"layer": "chunk", "projection": "layer", "mlp": "layer", "attention": "projection"}


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
    for event, around in nested(events):
        assert around.kind == {**CONTAINERS, "loss": "chunk", "chunk": "phase"}[event.kind]
        assert around.layer in (None, event.layer)
        assert around.chunk in (None, event.chunk)


def nested(events):
    """Pairs of a span of the compute track and the innermost that holds it; none cross."""
    ends, pairs = [], []
    track = [e for e in events if e.kind not in ("copy_in", "copy_out")]
    for event in sorted(track, key=lambda e: (e.t_ns, -e.dur_ns)):
        while ends and ends[-1].t_ns + ends[-1].dur_ns <= event.t_ns:
            ends.pop()
        if ends:
            around = ends[-1]
            assert event.t_ns + event.dur_ns <= around.t_ns + around.dur_ns, (event, around)
            pairs.append((event, around))
        ends.append(event)
    return pairs


@pytest.mark.parametrize("policy", RUNS)
@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3_moe", "gpt_oss"])
def test_spans_of_one_track_nest_in_every_family(family, policy):
    recorder = Recorder()
    config = oomb.EngineConfig(recorder=recorder, activation_policy=policy, **SIZES)
    with oomb.Engine(tiny_model(family, torch.float32), config) as engine:
        engine.step(IDS)
    pairs = nested(recorder.events)
    counts = Counter((e.kind, e.backward) for e, _ in pairs if e.phase == "sweep")
    assert counts["chunk", False] == -(-IDS.shape[1] // SIZES["chunk_size"])
    for kind, (forward, backward) in RUNS[policy].items():
        assert counts[kind, False] == 3 * 2 * forward, kind
        assert counts[kind, True] == 3 * 2 * backward, kind
    for event, around in pairs:
        if event.kind in CONTAINERS:
            assert (around.kind, around.chunk) == (CONTAINERS[event.kind], event.chunk)


@pytest.mark.parametrize("policy", RUNS)
def test_a_layer_runs_again_before_the_backward_of_its_parts(policy):
    """So that what is computed twice counts as the layer's time, and each part as its own."""
    events = engine_events(activation_policy=policy).events
    inside = [
        event.kind
        for event, around in nested(events)
        if around.kind == "layer" and around.backward and (event.chunk, event.layer) == (1, 0)
    ]
    again = [] if policy == "keep" else ["projection", "mlp"]
    assert inside == [*again, "mlp", "projection"]


def test_stages_of_a_part_whose_input_needs_no_gradient_end_with_the_backward():
    recorder = Recorder()
    model = tiny_model("qwen2", torch.float32).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.requires_grad_(True)
    with oomb.Engine(model, oomb.EngineConfig(recorder=recorder, **SIZES)) as engine:
        engine.step(IDS)
    counts = Counter(
        (e.kind, e.layer) for e, _ in nested(recorder.events) if e.backward and e.chunk == 2
    )
    assert counts == {
        **{("layer", layer): 1 for layer in range(2)},
        **{("attention", layer): 1 for layer in range(2)},
        **{("projection", layer): 2 for layer in range(2)},
        **{("mlp", layer): 2 for layer in range(2)},
    }


class Fails(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("planted")


def test_a_backward_that_raises_leaves_no_stage_to_the_next_step():
    recorder = Recorder()
    model = tiny_model("qwen2", torch.float32)
    mlp, own = model.model.layers[0].mlp.act_fn, model.model.layers[0].mlp.act_fn.forward
    with oomb.Engine(model, oomb.EngineConfig(recorder=recorder, **SIZES)) as engine:
        mlp.forward = lambda x: Fails.apply(own(x))
        with pytest.raises(ArithmeticError, match="planted"):
            engine.step(IDS)
        before = Counter((e.kind, e.backward) for e in recorder.events)
        assert before["mlp", True] > before["layer", True]  # some were cut off
        del mlp.forward
        engine.step(IDS)
    second = [e for e in recorder.events if e.step == 1]
    alone = engine_events().events
    assert Counter((e.kind, e.phase, e.chunk, e.layer, e.backward) for e in second) == Counter(
        (e.kind, e.phase, e.chunk, e.layer, e.backward) for e in alone
    )
    nested(second)


def test_a_step_opens_as_many_stages_where_nobody_listens_and_they_cost_little(monkeypatch):
    """The cost is printed (`pytest -s`), not judged: a busy machine would fail any limit."""
    listened = [e for e in engine_events().events if e.kind != "phase"]
    entered, enter = [], Stage.__enter__
    with oomb.Engine(tiny_model("qwen2", torch.float32), oomb.EngineConfig(**SIZES)) as engine:
        monkeypatch.setattr(Stage, "__enter__", lambda self: entered.append(self) or enter(self))
        seconds = engine.step(IDS).timings["total"]
        monkeypatch.undo()
    assert len(entered) == len(listened) > 50

    def idle():
        with stage("mlp", 3):
            pass

    each = min(timeit.repeat(idle, number=2000, repeat=5)) / 2000
    share = len(entered) * each / seconds
    print(f"\n{each * 1e6:.1f} us x {len(entered)} stages: {share:.2%} of the tiniest model's step")


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
        self.open, self.opened, self.started = [], [], set()

    def get_event_attributes(self, message):
        return message

    def push_range(self, attributes):
        self.open.append(attributes)
        self.opened.append(attributes)

    def pop_range(self):
        self.open.pop()

    def start_range(self, attributes):
        self.started.add(attributes)
        self.opened.append(attributes)
        return attributes

    def end_range(self, started):
        self.started.remove(started)


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
    with pytest.raises(KeyError), module.halting_stage("phase", Place()):
        assert (domain.open, domain.started) == ([], {"phase"})
        raise KeyError
    assert domain.started == set()


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


def test_an_optimizers_steps_belong_to_the_step_before():
    def closure():
        raise ArithmeticError("planted")

    recorder = Recorder()
    model = tiny_model("qwen2", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = oomb.EngineConfig(recorder=recorder, **SIZES)
    with oomb.Engine(model, config) as engine:
        engine.watch(optimizer)
        engine.watch(optimizer)
        optimizer.step()  # before any step nobody listens
        for _ in range(2):
            engine.step(IDS)
            optimizer.step()
        with pytest.raises(ArithmeticError, match="planted"):
            optimizer.step(closure)
        optimizer.step()
    optimizer.step()  # nor after the engine
    shown = [e for e in recorder.events if e.kind == "optimizer"]
    assert [(e.step, e.phase, e.chunk) for e in shown] == [(step, None, None) for step in (0, 1, 1)]
    assert all(e.dur_ns > 0 for e in shown)
    of_step = [e.number for e in recorder.events if e.step == 1]
    assert len(set(of_step)) == len(of_step)


def test_only_torchs_optimizers_are_watched():
    with (
        oomb.Engine(tiny_model("qwen2", torch.float32), oomb.EngineConfig(**SIZES)) as engine,
        pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got Module"),
    ):
        engine.watch(torch.nn.Module())
