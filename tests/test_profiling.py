"""Stages, recordings and live bytes."""

import importlib.util
import io
import json
import os
import sys
import threading
import weakref
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import tiny_model
from torch.utils.checkpoint import checkpoint

import oomb
from oomb.profiling import Event, LiveBytes, Recorder, category, load_recording, stage
from oomb.profiling import recording as recording_module
from oomb.profiling.recording import COLUMNS, FORMAT_VERSION
from oomb.profiling.stage import KINDS, place

KB = 256  # fp32 numbers in a kilobyte
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


# -- stage ----------------------------------------------------------------------------------------


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
    with place("fill", 3, events.append), stage("layer", 1):
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
    with place("fill", 0, outer.append):
        with place("sweep", 7, inner.append), stage("loss"):
            pass
        with place("evaluate", 1, None), stage("loss"):
            pass  # an engine without a recorder sends nothing to another's
        with stage("mlp"):
            pass
    with stage("mlp"):
        pass  # outside of a step nobody listens
    assert [(e.phase, e.chunk, e.kind) for e in inner] == [("sweep", 7, "loss")]
    assert [(e.phase, e.chunk, e.kind) for e in outer] == [("fill", 0, "mlp")]


def test_a_stage_that_raises_still_ends():
    events = []
    with pytest.raises(KeyError), place("fill", 0, events.append), stage("chunk"), stage("loss"):
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
    with place("sweep", 2, events.append):
        loss = Marked.apply(x).sum()
        other = threading.Thread(target=loss.backward)
        other.start()
        other.join()
    assert Marked.threads == [other.ident] != [threading.get_ident()]
    (event,) = events
    assert event.dur_ns > 0
    assert event == Event("attention", "sweep", 2, 5, event.t_ns, event.dur_ns, True)


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
    assert counts["oomb::attention"] == 2 * (2 + 3 + 3)  # filled, swept, and swept backward
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
    with module.place("fill", 0, events.append), module.stage("mlp", 2):
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


# -- recordings -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorder():
    recorder = engine_events()
    recorder.notes = {"model": "tiny"}
    return recorder


@pytest.fixture
def saved(recorder, tmp_path):
    return recorder.save(tmp_path / "run.oomb")


def test_a_recording_comes_back_as_it_was(recorder, saved):
    loaded = load_recording(saved)
    assert len(loaded) == len(recorder.events) > 50
    assert loaded.header["notes"] == {"model": "tiny"}
    assert loaded.header["format"] == FORMAT_VERSION
    names = {"kind": loaded.header["kinds"], "phase": loaded.header["phases"]}
    for number, event in enumerate(recorder.events):
        row = {name: int(column[number]) for name, column in loaded.columns.items()}
        none = recording_module.NONE
        assert row == {
            "t_ns": event.t_ns,
            "dur_ns": event.dur_ns,
            "step": event.step,
            "phase": names["phase"].index(event.phase),
            "chunk": none if event.chunk is None else event.chunk,
            "layer": none if event.layer is None else event.layer,
            "kind": names["kind"].index(event.kind),
            "backward": event.backward,
        }
    seconds = sum(e.dur_ns for e in recorder.events if e.kind == "attention") / 1e9
    assert loaded.seconds("attention") == pytest.approx(seconds, rel=1e-12)
    parts = [loaded.seconds("attention", phase) for phase in ("fill", "sweep", "evaluate")]
    assert sum(parts) == pytest.approx(seconds, rel=1e-12)
    assert min(parts[:2]) > 0 == parts[2]


def test_columns_are_little_endian_and_without_pickles(saved):
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
        assert {*archive.namelist()} == {"header.json", *(f"events/{c}.npy" for c in COLUMNS)}
        for name, dtype in COLUMNS.items():
            column = np.load(io.BytesIO(archive.read(f"events/{name}.npy")), allow_pickle=False)
            assert column.dtype.str == dtype


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


def test_a_recorder_without_events_is_a_recording_too(tmp_path):
    loaded = load_recording(Recorder().save(tmp_path / "empty.oomb"))
    assert len(loaded) == 0
    assert loaded.seconds("attention") == 0.0


@pytest.mark.parametrize("earlier", [None, b"an earlier recording"], ids=["new", "over another"])
@pytest.mark.parametrize("fault", ["write", "replace"])
def test_a_crash_while_saving_leaves_what_was_there(
    recorder, tmp_path, monkeypatch, fault, earlier
):
    path = tmp_path / "run.oomb"
    if earlier:
        path.write_bytes(earlier)
    calls = []

    def crash(*arguments, **keywords):
        calls.append(arguments)
        if fault == "replace" or len(calls) == 3:
            raise OSError("no space left on device")
        return save(*arguments, **keywords)

    save = np.save
    owner, name = (os, "replace") if fault == "replace" else (np, "save")
    monkeypatch.setattr(owner, name, crash)
    with pytest.raises(OSError, match="no space left"):
        recorder.save(path)
    assert calls
    assert [found.name for found in tmp_path.iterdir()] == (["run.oomb"] if earlier else [])
    if earlier:
        assert path.read_bytes() == earlier


def test_notes_that_json_cannot_hold_are_refused_before_any_file_is_made(tmp_path):
    with pytest.raises(TypeError):
        Recorder(notes={"model": object()}).save(tmp_path / "run.oomb")
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_or_file_is_named(recorder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        recorder.save(tmp_path / "nowhere" / "run.oomb")
    with pytest.raises(FileNotFoundError, match=r"absent\.oomb"):
        load_recording(tmp_path / "absent.oomb")


def rewrite(path, target, **members):
    """A copy of a recording with members replaced by bytes, added, or (None) left out."""
    members = {
        name.replace("__", "/") + end: body
        for (name, end), body in (
            ((key, ".json" if key == "header" else ".npy"), value) for key, value in members.items()
        )
    }
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in {**dict.fromkeys(old.namelist()), **members}:
            body = members[name] if name in members else old.read(name)
            if body is not None:
                new.writestr(name, body)
    return target


def array(values, **keywords):
    buffer = io.BytesIO()
    np.save(buffer, values, **keywords)
    return buffer.getvalue()


def test_unknown_columns_and_members_are_ignored(saved, tmp_path):
    more = rewrite(saved, tmp_path / "more.oomb", events__joules=array(np.ones(3)), probes__x=b"?")
    loaded, plain = load_recording(more), load_recording(saved)
    assert loaded.columns.keys() == plain.columns.keys()
    for name, column in plain.columns.items():
        assert np.array_equal(loaded.columns[name], column)


def test_a_newer_format_is_refused_by_number(saved, tmp_path):
    header = {**load_recording(saved).header, "format": FORMAT_VERSION + 1}
    newer = rewrite(saved, tmp_path / "newer.oomb", header=json.dumps(header))
    with pytest.raises(ValueError, match=f"format {FORMAT_VERSION + 1}, this version reads up to"):
        load_recording(newer)


def flipped(body, position):
    return body[:position] + bytes([body[position] ^ 0x5A]) + body[position + 1 :]


HUGE = json.dumps({"format": 1, "kinds": [], "phases": [], "notes": "x" * (2 << 20), "events": 0})
DAMAGE = {
    "no time": {"events__t_ns": lambda n: None},
    "no kind": {"events__kind": lambda n: None},
    "no layer": {"events__layer": lambda n: None},
    "too short": {"events__layer": lambda n: array(np.zeros(n - 1, "<i4"))},
    "too long": {"events__layer": lambda n: array(np.zeros(n + 1, "<i4"))},
    "far too long": {"events__layer": lambda n: array(np.zeros(n + 100_000, "<i4"))},
    "a table": {"events__t_ns": lambda n: array(np.zeros((n, 2), "<i8"))},
    "a number": {"events__t_ns": lambda n: array(np.int64(3))},
    "not integers": {"events__kind": lambda n: array(np.full(n, np.nan))},
    "words": {"events__kind": lambda n: array(np.array(["a"] * n))},
    "a kind without a name": {"events__kind": lambda n: array(np.full(n, 99, "|i1"))},
    "a phase without a name": {"events__phase": lambda n: array(np.full(n, -2, "|i1"))},
    "an empty column": {"events__t_ns": lambda n: b""},
    "a column of noise": {"events__t_ns": lambda n: b"noise" * 20},
    "a cut column": {"events__t_ns": lambda n: array(np.zeros(n, "<i8"))[:-8]},
    "no header": {"header": lambda n: None},
    "an empty header": {"header": lambda n: b"{}"},
    "a list for a header": {"header": lambda n: b"[1]"},
    "no JSON": {"header": lambda n: b"{"},
    "no text": {"header": lambda n: b"\xff\xfe\xfa"},
    "a word for a format": {"header": lambda n: b'{"format": "a", "events": 0}'},
    "a huge header": {"header": lambda n: HUGE},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_recordings_are_refused_by_name(recorder, saved, tmp_path, damage):
    count = len(recorder.events)
    members = {name: make(count) for name, make in DAMAGE[damage].items()}
    broken = rewrite(saved, tmp_path / "broken.oomb", **members)
    with pytest.raises(
        ValueError, match=r"broken\.oomb is damaged or no oomb recording: ."
    ) as refusal:
        load_recording(broken)
    assert type(refusal.value) is ValueError  # not a JSONDecodeError, whose text names no file


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1], ids=str)
def test_cut_off_files_are_refused_by_name(saved, tmp_path, kept):
    body = saved.read_bytes()
    cut = tmp_path / "cut.oomb"
    cut.write_bytes(body[: int(kept * len(body)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"cut\.oomb is damaged or no oomb recording"):
        load_recording(cut)


def test_a_file_with_any_byte_changed_loads_as_it_was_or_is_refused_by_name(saved, tmp_path):
    """Every third byte in turn: zip, zlib and numpy raise errors of many types on these."""
    body, plain = saved.read_bytes(), load_recording(saved)
    path = tmp_path / "flipped.oomb"
    refused = 0
    for position in range(0, len(body), 3):
        path.write_bytes(flipped(body, position))
        try:
            loaded = load_recording(path)
        except ValueError as error:
            assert str(error).startswith(f"{path} is damaged or no oomb recording: ")
            refused += 1
        else:  # a date, a name or another field that carries no content
            for name, column in plain.columns.items():
                assert np.array_equal(loaded.columns[name], column)
    assert refused > len(body) / 3 / 2


def test_pickles_are_never_loaded(saved, tmp_path):
    """A column of objects could run anything when unpickled."""

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    count = len(load_recording(saved))
    bomb = array(np.array([Bomb()] * count, dtype=object), allow_pickle=True)
    with pytest.raises(ValueError):
        load_recording(rewrite(saved, tmp_path / "bomb.oomb", events__layer=bomb))


# -- live bytes -----------------------------------------------------------------------------------


def test_bytes_of_allocations_and_frees():
    before = torch.ones(KB)
    with LiveBytes() as live:
        a = torch.zeros(4 * KB)
        assert live.current == 4096
        b = torch.ones(2 * KB, dtype=torch.float64)
        assert live.current == 8192
        c = a + a
        assert live.current == live.peak == 12288
        del a, c
        assert live.current == 4096
        before.add_(1.0)  # no allocation, and an input is not ours
        d = before * 2.0
        assert live.current == 4096 + 1024
        del d
        assert live.peak == 12288
        live.reset_peak()
        assert live.peak == live.current == 4096
    del b
    assert live.current == 0  # freed after the block counts as freed


def test_views_and_in_place_operators_share_their_storage():
    with LiveBytes() as live:
        a = torch.zeros(4 * KB)
        views = [a[:KB], a.view(4, KB).t(), a.detach(), a[None].expand(8, -1), a[::2]]
        a.add_(1.0).mul_(2.0)
        views[0].fill_(3.0)
        assert live.current == live.peak == 4096
        del a
        assert live.current == 4096  # the views hold it
        part = views[0]
        views.clear()
        assert live.current == 4096
        del part
    assert live.current == 0


def test_a_copy_is_counted_where_a_view_is_not():
    with LiveBytes() as live:
        a = torch.zeros(8, KB)
        assert a.t().contiguous().shape == (KB, 8)
        assert (live.current, live.peak) == (8192, 16384)
        a.t().reshape(8, KB)
        assert live.peak == 16384
        a.to(torch.float64)
        assert live.peak == 8192 + 16384


def test_tensors_held_by_the_graph_alone_are_alive():
    w = torch.randn(KB, requires_grad=True)
    with LiveBytes() as live:
        y = (w * 2.0).exp().sum()  # exp keeps its output, the product is gone
        assert live.current == 1024 + 4
        y.backward()
        assert live.current == 1024 + 4  # the graph's tensor is freed, the gradient is alive
        w.grad = None
    assert live.current == 4


@pytest.mark.parametrize(("run", "per_block"), [("plain", 2), ("checkpointed", 1)])
def test_checkpointed_tensors_are_dropped_and_made_again(run, per_block):
    """A block keeps two tensors (exp its output, cos its input); checkpointed, only its input."""

    def block(x):
        return (x.exp().sin() * 2.0).cos()

    w = torch.randn(64 * KB, requires_grad=True)
    held, peaks = {}, {}
    for blocks in (4, 8):
        w.grad = None
        with LiveBytes() as live:
            y = w * 1.0
            for _ in range(blocks):
                y = block(y) if run == "plain" else checkpoint(block, y, use_reentrant=False)
            held[blocks] = live.current / w.nbytes
            y.sum().backward()
            peaks[blocks] = live.peak / w.nbytes
    assert held == {4: 4 * per_block + 1, 8: 8 * per_block + 1}  # and the result
    assert peaks[8] - peaks[4] == 4 * per_block
    assert peaks[4] > held[4] + 1  # backward's own tensors, those made again among them


def test_what_backward_allocates_is_seen():
    """Also from inside a custom function, on whatever thread it runs."""
    during = {}

    class Scratch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            before = live.current
            scratch = torch.zeros(100 * KB)
            during["more"] = live.current - before
            return grad + scratch.sum()

    x = torch.zeros(KB, requires_grad=True)
    with LiveBytes() as live:
        loss = Scratch.apply(x).sum()
        live.reset_peak()
        start = live.current
        loss.backward()
    assert during["more"] == 100 * 1024
    assert 0 <= live.peak - start - 100 * 1024 <= 3 * 1024
    assert live.current == 1024 + 4  # the gradient and the loss


def test_categories_are_counted_apart_until_freed():
    with LiveBytes() as live:
        with category("kv_pages"):
            pages = torch.zeros(4 * KB)
            with category("page_gradients"):
                gradients = torch.zeros(2 * KB)
            more = torch.zeros(KB)
        rest = pages + 1.0
        view = pages[:3]
        assert dict(live.current_by) == {"kv_pages": 5120, "page_gradients": 2048, "other": 4096}
        del pages, more, rest
        assert live.current_by["kv_pages"] == 4096  # by the view
        del view, gradients
    assert set(live.current_by.values()) == {0}
    assert dict(live.peak_by) == {"kv_pages": 5120, "page_gradients": 2048, "other": 4096}


def test_a_category_ends_even_where_its_body_raises():
    with LiveBytes() as live:
        with pytest.raises(KeyError), category("kv_pages"):
            raise KeyError
        kept = torch.zeros(KB)
    assert live.current_by == {"other": kept.nbytes}


def test_an_address_used_again_is_counted_again():
    """The allocator hands freed storages out again at once."""
    with LiveBytes() as live:
        addresses = set()
        for _ in range(50):
            a = torch.zeros(KB)
            assert live.current == 1024
            addresses.add(a.data_ptr())
            del a
    assert len(addresses) < 50  # it did happen
    assert (live.current, live.peak) == (0, 1024)


def test_tensors_made_from_data_are_counted():
    """torch.tensor makes them before dispatch; their first operator is a lift."""
    with LiveBytes() as live:
        kept = torch.tensor([1.0] * KB)
        assert live.current == 1024
        shared = torch.from_numpy(np.zeros(KB, np.float32)) + kept
        assert live.current == 2048  # memory of numpy's is not torch's
        del kept
    assert live.current == shared.nbytes


def test_storages_that_grow_and_shrink_are_counted_at_their_size():
    with LiveBytes() as live:
        a = torch.empty(0)
        a.resize_(4 * KB)
        assert live.current == 4096
        torch.cat([torch.zeros(4 * KB), torch.zeros(4 * KB)], out=(b := torch.empty(0)))
        assert live.current == 4096 + b.nbytes == 4096 + 8192
        a.untyped_storage().resize_(0)  # not an operator: seen with the next one
        a.detach()
        assert live.current == 8192
        del a, b
    assert live.current == 0


def test_tensors_without_ordinary_memory_are_passed_over():
    embedding = torch.nn.Embedding(5, KB, sparse=True)
    with LiveBytes() as live:
        embedding(torch.tensor([1, 2])).sum().backward()
        assert embedding.weight.grad.is_sparse
        live.reset_peak()
        torch.zeros(1 << 40, device="meta")
    assert live.peak < 1 << 20


def test_one_inside_another_counts_the_same():
    with LiveBytes() as outer:
        a = torch.zeros(KB)
        with LiveBytes() as inner:
            b = a + torch.zeros(KB)
            assert (inner.current, outer.current) == (1024, 2048)
            del a
            assert (inner.current, outer.current) == (1024, 1024)
        del b
    assert (inner.current, outer.current) == (0, 0)
    assert (inner.peak, outer.peak) == (2048, 3072)


def test_counting_keeps_nothing_alive():
    with LiveBytes() as live:
        a = torch.zeros(KB)
        reference = weakref.ref(a)
        del a
        assert reference() is None
    assert live.current == 0


def test_pages_and_gradients_of_a_step_have_their_own_categories():
    """20 tokens of 2 layers, 2 heads of 8 numbers, K and V in fp32: chunks 0 and 1 need pages."""
    model = tiny_model("qwen2", torch.float32)
    with oomb.Engine(model, oomb.EngineConfig(**SIZES)) as engine:
        engine.step(IDS)  # gradients exist from now on
        with LiveBytes() as live:
            engine.step(IDS)
    pages = 16 * 2 * 2 * 2 * 8 * 4
    assert live.peak_by["kv_pages"] == live.peak_by["page_gradients"] == pages
    assert live.current_by["kv_pages"] == live.current_by["page_gradients"] == 0
