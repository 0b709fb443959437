"""NVTX ranges as Nsight would get them, without Nsight and without a GPU."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("nvtx", reason="needs the package nvtx, which passes stages on to Nsight")

STEP = """
import json, sys
import nvtx, torch
from helpers import tiny_model
import oomb
from oomb.profiling import Recorder

torch.set_num_threads(1)
recorder = Recorder()
config = oomb.EngineConfig(
    chunk_size=8, page_size=4, segment_pages=1, recorder=recorder,
    activation_policy=sys.argv[1], offload=oomb.OffloadConfig(gpu_budget=0),
)
with oomb.Engine(tiny_model("qwen2", torch.float32), config) as engine:
    engine.step(torch.arange(3, 31)[None])  # ends what attaching began
    recorder.events.clear()
    around = nvtx.get_domain("test")
    around.push_range(around.get_event_attributes("step"))
    engine.step(torch.arange(3, 31)[None])
    around.pop_range()
events = sorted(recorder.events, key=lambda e: e.t_ns)
print(json.dumps([(e.kind, e.backward, e.t_ns, e.dur_ns) for e in events]))
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    """The library that logs ranges."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler (cc, gcc or clang) to build the tool that NVTX loads")
    library = tmp_path_factory.mktemp("nvtx") / "log.so"
    source = Path(__file__).with_name("nvtx_log.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def logged(path):
    """(what, thread, name, id) of each range of a step, in order."""
    rows = [line.split() for line in path.read_text().splitlines()]
    first, last = (i for i, row in enumerate(rows) if row[2] == "test")
    assert {row[2] for row in rows} == {"test", "oomb"}
    return [(what, thread, name, ident) for what, thread, _, name, ident in rows[first + 1 : last]]


def tree(ranges):
    """Names with their depth, in order of opening, of one thread's ranges; all must close."""
    depth, found = 0, []
    for what, name in ranges:
        if what == "push":
            found.append((name, depth))
        depth += 1 if what == "push" else -1
        assert depth >= 0
    assert depth == 0
    return found


def tree_of_spans(spans):
    """The same of spans (name, begin, length), in order of their beginning."""
    found, ends = [], []
    for name, begin, length in spans:
        while ends and ends[-1] <= begin:
            ends.pop()
        found.append((name, len(ends)))
        ends.append(begin + length)
    return found


@pytest.mark.parametrize("policy", ["keep", "selective", "layer"])
def test_ranges_are_those_of_the_recording_forward_and_backward(tool, tmp_path, policy):
    log = tmp_path / "ranges.txt"
    environment = {
        **os.environ,
        "NVTX_INJECTION64_PATH": str(tool),
        "NVTX_LOG": str(log),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    ran = subprocess.run(
        [sys.executable, "-c", STEP, policy],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    events, ranges = json.loads(ran.stdout.splitlines()[-1]), logged(log)

    phases = [row for row in ranges if row[0] in ("start", "end")]
    assert [(row[0], row[2]) for row in phases] == [("start", "phase"), ("end", "-")] * 2
    assert [row[3] for row in phases[::2]] == [row[3] for row in phases[1::2]]

    threads = {}
    for what, thread, name, _ in ranges:
        if what in ("push", "pop"):
            threads.setdefault(thread, []).append((what, name))
    computing = next(t for t, rows in threads.items() if ("push", "chunk") in rows)
    spans = [
        (kind, begin, length)
        for kind, _, begin, length in events
        if kind not in ("phase", "copy_in", "copy_out", "wait")
    ]
    ours = [row for row in tree(threads.pop(computing)) if row[0] != "wait"]
    assert ours == tree_of_spans(spans)
    assert any(backward for kind, backward, *_ in events if kind == "mlp")
    copies = Counter(name for rows in threads.values() for name, _ in tree(rows))
    assert copies == Counter(e[0] for e in events if e[0] in ("copy_in", "copy_out"))
    waits = Counter(name for what, thread, name, _ in ranges if what == "push")["wait"]
    assert waits == sum(e[0] == "wait" for e in events) > 0
