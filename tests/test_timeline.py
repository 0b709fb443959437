"""Timelines: spans of a device that is behind the host become events with the device's times."""

from collections import Counter

import pytest
import torch
from helpers import tiny_model

import oomb
from oomb.profiling import Recorder, load_recording, stage
from oomb.profiling.place import Place, at_place
from oomb.profiling.timeline import Timeline


class LateClock:
    """Marks that are given a time later."""

    instant = False

    def __init__(self):
        self.marks, self.waited, self.anchors = [], [], 0

    def anchor(self):
        self.anchors += 1

    def mark(self):
        self.marks.append([None])
        return self.marks[-1]

    def reached(self, mark):
        return mark[0] is not None

    def wait(self, mark):
        self.waited.append(mark)

    def nanoseconds(self, mark):
        return mark[0]

    def happen(self, *times):
        """Give the marks their times, in the order in which they were made."""
        for mark, time in zip(self.marks, times, strict=False):
            mark[0] = time


@pytest.fixture
def late():
    clock, events = LateClock(), []
    timeline = Timeline(events.append, clock, step=4)
    with at_place(Place("sweep", 2, timeline)):
        yield clock, timeline, events


def times(events):
    return [(e.kind, e.t_ns, e.dur_ns) for e in events]


def test_events_are_sent_in_order_once_their_times_are_known(late):
    clock, timeline, events = late
    with stage("layer", 1), stage("mlp", 1):
        pass
    timeline.publish()
    assert events == []
    clock.happen(10, 20, 50)  # the end of the layer is yet to come
    timeline.publish()
    assert times(events) == [("mlp", 20, 30)]
    clock.happen(10, 20, 50, 70)
    timeline.publish()
    timeline.publish()
    assert times(events) == [("mlp", 20, 30), ("layer", 10, 60)]
    assert [(e.phase, e.chunk, e.layer, e.step) for e in events] == [("sweep", 2, 1, 4)] * 2
    assert clock.waited == []


def test_closing_waits_for_what_is_left(late):
    clock, timeline, events = late
    with stage("loss"):
        pass
    clock.happen(3, 8)
    timeline.close()
    assert times(events) == [("loss", 3, 5)]
    assert clock.waited == clock.marks


def wait_for(*copies):
    with stage("wait", 0, waits_on=copies):
        pass


def copy(kind, nbytes):
    with stage(kind, 0, nbytes=nbytes) as span:
        pass
    return span


@pytest.mark.parametrize(
    ("begun", "waited", "longest"),
    [(40, 50, 1), (75, 15, 1), (95, 0, 1)],
    ids=["both to come", "one is over", "both are over"],
)
def test_a_wait_ends_with_the_last_copy_that_it_waits_for(late, begun, waited, longest):
    clock, timeline, events = late
    wait_for(copy("copy_in", 8), copy("copy_out", 16))
    clock.happen(0, 70, 30, 90, begun, begun + 1)
    timeline.publish()
    *copies, wait = events
    assert [(e.kind, e.dur_ns, e.nbytes, e.waits_on) for e in copies] == [
        ("copy_in", 70, 8, None),
        ("copy_out", 60, 16, None),
    ]
    assert (wait.t_ns, wait.dur_ns) == (begun, waited)
    assert wait.waits_on == copies[longest].number
    assert len({e.number for e in events}) == 3


def test_a_wait_is_sent_after_the_copy_that_it_names(late):
    clock, timeline, events = late
    wait_for(copy("copy_in", 8))
    clock.happen(None, None, 10, 11)
    timeline.publish()
    assert events == []


def test_a_copy_that_has_not_begun_was_not_waited_for(late):
    clock, timeline, events = late
    forgotten = stage("copy_in", 0, nbytes=8)
    wait_for(forgotten.span)
    clock.happen(5, 6)
    timeline.publish()
    (wait,) = events
    assert (wait.dur_ns, wait.waits_on) == (0, None)


def test_a_stage_belongs_to_where_it_was_made():
    events = []
    timeline = Timeline(events.append)
    with at_place(Place("fill", 1, timeline)):
        later = stage("copy_out", 3)
    with at_place(Place("sweep", 9, timeline)), later:
        pass
    with later:
        pass
    assert {(e.phase, e.chunk, e.layer) for e in events} == {("fill", 1, 3)}


def offloaded(tmp_path, **changes):
    """Events of a step whose pages are all on the host."""
    recorder = Recorder()
    config = oomb.EngineConfig(
        chunk_size=8, page_size=4, segment_pages=1, recorder=recorder,
        offload=oomb.OffloadConfig(gpu_budget=0, **changes),
    )  # fmt: skip
    with oomb.Engine(tiny_model("qwen2", torch.float32), config) as engine:
        engine.step(torch.arange(3, 31)[None])
    return recorder, load_recording(recorder.save(tmp_path / "run.oomb"))


def test_copies_and_waits_of_a_step_say_what_moved_and_why(tmp_path):
    recorder, recording = offloaded(tmp_path)
    by_number = {event.number: event for event in recorder.events}
    assert len(by_number) == len(recorder.events)
    copies = [e for e in recorder.events if e.kind in ("copy_in", "copy_out")]
    page = 2 * 4 * 2 * 8 * 4  # K and V, tokens, heads, dim, fp32
    written = [e for e in copies if e.kind == "copy_out" and e.phase == "fill"]
    assert {(e.chunk, e.layer, e.nbytes) for e in written} == {
        (chunk, layer, page) for chunk in range(3) for layer in range(2)
    }
    assert len(written) == 2 * 2 * 3  # two pages to a chunk
    for event in recorder.events:
        assert (event.nbytes is not None) == (event in copies)
        if event.kind == "wait":
            cause = by_number[event.waits_on]
            assert cause in copies
            assert event.dur_ns == max(0, cause.t_ns + cause.dur_ns - event.t_ns)
    waits = Counter((e.phase, e.backward) for e in recorder.events if e.kind == "wait")
    assert waits.keys() == {("fill", False), ("sweep", False), ("sweep", True)}
    busy = sum(e.dur_ns for e in copies)
    exposed = sum(e.dur_ns for e in recorder.events if e.kind == "wait")
    assert recording.hidden_share == pytest.approx(1 - exposed / busy)
    assert recording.hidden_share <= 1


def test_without_copies_there_is_no_hidden_share(tmp_path):
    assert load_recording(Recorder().save(tmp_path / "run.oomb")).hidden_share is None
