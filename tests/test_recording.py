"""Recordings: saved whole or not at all, read back as they were or refused."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
import torch
from helpers import tiny_model

import oomb
from oomb.profiling import Recorder, load_recording
from oomb.profiling import recording as recording_module
from oomb.profiling.recording import COLUMNS, FORMAT_VERSION, LATER_COLUMNS


@pytest.fixture(scope="module")
def recorder():
    recorder = Recorder(notes={"model": "tiny"})
    config = oomb.EngineConfig(chunk_size=8, page_size=4, recorder=recorder)
    with oomb.Engine(tiny_model("qwen2", torch.float32), config) as engine:
        engine.step(torch.arange(3, 23)[None])
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
            "enqueue_ns": event.enqueue_ns,
            "number": event.number,
            "nbytes": none if event.nbytes is None else event.nbytes,
            "waits_on": none if event.waits_on is None else event.waits_on,
        }
    seconds = sum(e.dur_ns for e in recorder.events if e.kind == "attention") / 1e9
    assert loaded.seconds("attention") == pytest.approx(seconds, rel=1e-12)
    parts = [loaded.seconds("attention", phase) for phase in ("fill", "sweep", "evaluate")]
    assert sum(parts) == pytest.approx(seconds, rel=1e-12)
    assert min(parts[:2]) > 0 == parts[2]


def test_columns_are_little_endian_and_without_pickles(saved):
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
        columns = {**COLUMNS, **LATER_COLUMNS}
        assert {*archive.namelist()} == {"header.json", *(f"events/{c}.npy" for c in columns)}
        for name, dtype in columns.items():
            column = np.load(io.BytesIO(archive.read(f"events/{name}.npy")), allow_pickle=False)
            assert column.dtype.str == dtype


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


def test_a_file_from_before_the_later_columns_has_none_of_their_numbers(saved, tmp_path):
    header = {**load_recording(saved).header}
    header["columns"] = [*COLUMNS]
    left_out = {f"events__{name}": None for name in LATER_COLUMNS}
    older = load_recording(
        rewrite(saved, tmp_path / "older.oomb", header=json.dumps(header), **left_out)
    )
    plain = load_recording(saved)
    for name in COLUMNS:
        assert np.array_equal(older.columns[name], plain.columns[name])
    for name in LATER_COLUMNS:
        assert (older.columns[name] == recording_module.NONE).all()
        assert len(older.columns[name]) == len(older)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("offloaded", [False, True])
def test_copies_on_a_cpu_are_called_simulated(offloaded):
    recorder, offload = Recorder(), oomb.OffloadConfig() if offloaded else None
    config = oomb.EngineConfig(chunk_size=8, page_size=4, recorder=recorder, offload=offload)
    with oomb.Engine(tiny_model("llama", torch.float32), config) as engine:
        engine.step(torch.arange(3, 31)[None])
    assert recorder.recording().header["source"] == ("simulated" if offloaded else "cpu")
