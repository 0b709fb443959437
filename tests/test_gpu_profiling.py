"""Events of a GPU: times of its streams, not of the host that runs ahead."""

from itertools import pairwise

import pytest
import torch
from helpers import tiny_model

import oomb
from oomb.offload.cuda import CudaTier
from oomb.profiling import Recorder, stage
from oomb.profiling.clock import clock_of
from oomb.profiling.place import Place, at_place
from oomb.profiling.timeline import Timeline

pytestmark = pytest.mark.gpu
SLOW = 20_000_000
"""Cycles: about 10 ms."""


@pytest.fixture
def timeline():
    events = []
    timeline = Timeline(events.append, clock_of(torch.device("cuda")))
    with at_place(Place("fill", 0, timeline)):
        yield timeline, events


def sleep(kind, stream=None):
    with torch.cuda.stream(stream), stage(kind) as span:
        torch.cuda._sleep(SLOW)
    return span


def end(event):
    return event.t_ns + event.dur_ns


def test_a_stage_lasts_as_long_as_its_kernels(timeline):
    timeline, events = timeline
    with stage("layer"):
        for kind in ("attention", "mlp", "loss"):
            sleep(kind)
            timeline.clock.anchor()
    timeline.close()
    *inner, layer = events
    for before, after in pairwise(inner):
        assert after.t_ns >= end(before) - 1000
        assert after.enqueue_ns < after.t_ns  # the host was ahead
    assert min(e.dur_ns for e in inner) > 2e6
    assert max(e.dur_ns for e in inner) < 3 * min(e.dur_ns for e in inner)
    assert layer.dur_ns == pytest.approx(end(inner[-1]) - inner[0].t_ns, rel=0.05)


def test_streams_share_one_clock_also_before_an_anchor(timeline):
    timeline, events = timeline
    sleep("attention")
    copying = sleep("copy_in", torch.cuda.Stream())
    with stage("wait", waits_on=[copying]):
        pass
    timeline.clock.anchor()
    with torch.cuda.stream(torch.cuda.Stream()), stage("copy_out", nbytes=4):
        pass  # over long before what it is measured from
    sleep("mlp")
    timeline.close()
    attention, copy_in, wait, copy_out, mlp = events
    assert copy_in.t_ns < end(attention)
    assert end(wait) == max(wait.t_ns, end(copy_in))
    assert copy_out.t_ns < end(attention) < mlp.t_ns + 1000


def step_events(**changes):
    recorder = Recorder()
    model = tiny_model("llama", torch.bfloat16).cuda()
    config = oomb.EngineConfig(
        chunk_size=64, page_size=16, segment_pages=2, recorder=recorder,
        offload=oomb.OffloadConfig(gpu_budget=0), **changes,
    )  # fmt: skip
    with oomb.Engine(model, config) as engine:
        for _ in range(2):
            engine.step(torch.arange(3, 403, device="cuda")[None] % 90)
    return [event for event in recorder.events if event.step == 1]


def hidden_share(events):
    busy = sum(e.dur_ns for e in events if e.kind.startswith("copy"))
    return 1 - sum(e.dur_ns for e in events if e.kind == "wait") / busy


def test_a_step_is_ordered_on_the_gpu_as_it_was_launched():
    events = step_events()
    by_number = {event.number: event for event in events}
    phases = {event.phase: event for event in events if event.kind == "phase"}
    chunks = {(event.phase, event.chunk): event for event in events if event.kind == "chunk"}
    assert end(phases["fill"]) <= phases["sweep"].t_ns + 1000
    for event in events:
        if event.kind in ("projection", "attention", "mlp", "loss"):
            outer = chunks[event.phase, event.chunk]
            assert outer.t_ns - 1000 <= event.t_ns
            assert end(event) <= end(outer) + 1000
        if event.kind == "wait":
            assert end(event) == max(event.t_ns, end(by_number[event.waits_on]))
    assert {e.kind for e in events} >= {"copy_in", "copy_out", "wait"}


@pytest.mark.parametrize("kind", ["copy_in", "copy_out"])
def test_slow_copies_show_as_waits(kind, monkeypatch):
    real, copy = torch.Tensor.copy_, getattr(CudaTier, kind)

    def slow(tier, pairs, after, layer):
        def sleeping(to, *arguments, **keywords):
            torch.cuda._sleep(SLOW)
            return real(to, *arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", sleeping)
            return copy(tier, pairs, after, layer)

    monkeypatch.setattr(CudaTier, kind, slow)
    assert hidden_share(step_events()) < 0.5
