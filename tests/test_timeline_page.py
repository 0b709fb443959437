"""The timeline in a real browser: what is drawn, said and counted is what was recorded."""

from __future__ import annotations

import base64
import io
import re
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import launched
from helpers import tiny_model
from PIL import Image
from synthetic_recording import MS, T0, synthetic

import oomb
from oomb.profiling import Recorder, load_recording
from oomb.profiling.event import KINDS
from oomb.profiling.export import write_html
from oomb.profiling.recording import NONE
from oomb.profiling.web import module_source

WEB = Path(oomb.__file__).parent / "profiling" / "web"
GUTTER, RIGHT = 104, 14
COMPUTE = slice(118, 182)
FLAGS = slice(102, 118)
PACKED = re.compile(r'id="recording">([^<]*)<')


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """Opens pages without a network; at the end nothing may have gone wrong on any."""
    contexts, complaints = [], []

    def open_page(scheme="light", width=1000, **settings):
        context = browser.new_context(
            viewport={"width": width, "height": 700}, color_scheme=scheme, reduced_motion="reduce",
            offline=True, **settings,
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: r.url.startswith("http") and complaints.append(r.url))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def show(open_page, tmp_path):
    """Exports a recording, and opens the file."""

    def show(recording, **settings):
        page = open_page(**settings)
        page.goto(write_html(recording, tmp_path / "page.html").as_uri())
        page.wait_for_selector("canvas")
        return settle(page)

    return show


@pytest.fixture
def drive(open_page, tmp_path):
    """Draws a recording through the module itself; `window.t` is the timeline."""

    def drive(recording, page=None, **settings):
        page = page or open_page(**settings)
        text = write_html(recording, tmp_path / "page.html").read_text(encoding="utf-8")
        packed = PACKED.search(text)[1]
        page.set_content('<main id="here"></main>')
        page.evaluate("(text) => { window.packed = text }", packed)
        page.add_script_tag(
            type="module",
            content=module_source()
            + """
            const bytes = Uint8Array.from(atob(window.packed), (c) => c.charCodeAt(0));
            window.cursor = [];
            window.parts = {Pieces, fromArrays, innermost, thinned, ticks, readRecording};
            window.t = await timeline(document.getElementById("here"), bytes,
              {onCursor: (place) => window.cursor.push(place)});""",
        )
        page.wait_for_function("window.t")
        return settle(page)

    return drive


def settle(page):
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    return page


def press(page, *keys):
    page.focus("canvas")
    for key in keys:
        page.keyboard.press(key)
    return settle(page)


def figures(page):
    found = page.locator("[data-figure]").all()
    return {
        x.get_attribute("data-figure"): (x.get_attribute("value"), x.text_content()) for x in found
    }


def sentence(page):
    return page.locator(".sentence").text_content()


def view(page):
    return page.evaluate("[t.state.view.from, t.state.view.to]")


def red_columns(page, rows=COMPUTE):
    """Columns of the plot that have red in the given rows, of a picture of the screen."""
    picture = Image.open(io.BytesIO(page.locator("canvas").screenshot())).convert("RGB")
    red, green, blue = np.moveaxis(np.asarray(picture, dtype=int), 2, 0)
    is_red = (red > 170) & (green < 110) & (blue < 110)
    return np.flatnonzero(is_red[rows, GUTTER:-RIGHT].any(0)), picture.width - GUTTER - RIGHT


def step_seconds(recording):
    columns = recording.columns
    inside = columns["step"] == 0
    begin, end = columns["t_ns"][inside], (columns["t_ns"] + columns["dur_ns"])[inside]
    return float(end.max() - begin.min()) / 1e9


@pytest.fixture(scope="module")
def real():
    """A step whose pages are on the host, recorded here."""
    recorder = Recorder()
    config = oomb.EngineConfig(
        chunk_size=12, page_size=4, segment_pages=2, recorder=recorder,
        offload=oomb.OffloadConfig(gpu_budget=0),
    )  # fmt: skip
    with oomb.Engine(tiny_model("qwen2", torch.float32), config) as engine:
        engine.step(torch.arange(3, 90)[None] % 97)
    return recorder.recording()


def place_at(seed):
    rng = np.random.default_rng(seed)
    phase = ("fill", "sweep")[seed % 2]
    return phase, int(rng.integers(0, 7)), int(rng.integers(0, 4))


# -- planted waits --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 900)])
def test_a_stall_is_red_where_it_was_and_nowhere_else(show, scheme, width, seed):
    phase, chunk, layer = place = place_at(seed)
    recording = synthetic(waits={place: 9 * MS})
    page = show(recording, scheme=scheme, width=width)
    columns = recording.columns
    (row,) = np.flatnonzero(
        (columns["kind"] == recording.header["kinds"].index("wait")) & (columns["dur_ns"] > 0)
    )
    begin = (int(columns["t_ns"][row]) - T0) / 1e9
    red, wide = red_columns(page)
    expected = np.array([begin, begin + 0.009]) / step_seconds(recording) * wide
    assert red.min() == pytest.approx(expected[0], abs=2)
    assert red.max() == pytest.approx(expected[1], abs=2)
    flagged, _ = red_columns(page, FLAGS)
    assert flagged.min() <= expected.mean() <= flagged.max()
    assert f"9.00 ms in {phase}, chunk {chunk}, layer {layer} for a copy" in sentence(page)
    assert figures(page)["worst"] == ("0.009", "9.00 ms")


def test_a_short_wait_shows_among_a_thousand_times_as_much(show):
    """It takes less than a pixel, beside others of less than a pixel."""
    recording = synthetic(chunks=24, layers=8, segments=8, waits={("sweep", 11, 5): MS // 4})
    red, _ = red_columns(show(recording))
    assert 1 <= len(red) <= 2


def test_without_waits_nothing_is_red(show):
    page = show(synthetic())
    assert len(red_columns(page)[0]) == 0
    assert "No kernel waited for a copy." in sentence(page)
    assert figures(page)["worst"] == ("0", "none")
    assert page.get_by_role("button", name="next worst wait").is_disabled()


def test_n_visits_waits_from_the_worst_to_the_least(drive):
    waits = {("fill", 2, 1): 2 * MS, ("sweep", 5, 3): 7 * MS, ("sweep", 1, 0): 4 * MS}
    page = drive(synthetic(waits=waits))
    seen = []
    for _ in range(3):
        press(page, "n")
        seen.append(sentence(page))
        red, wide = red_columns(page)
        assert len(red) > 0.05 * wide
    assert [text.split(" for a copy")[0] for text in seen] == [
        "Wait 1 of 3: 7.00 ms in sweep, chunk 5, layer 3",
        "Wait 2 of 3: 4.00 ms in sweep, chunk 1, layer 0",
        "Wait 3 of 3: 2.00 ms in fill, chunk 2, layer 1",
    ]
    press(page, "n")
    assert sentence(page) == seen[0]
    press(page, "N")
    assert sentence(page) == seen[2]
    last = page.evaluate("window.cursor.at(-1)")
    assert [last[name] for name in ("phase", "chunk", "layer")] == ["fill", 2, 1]


# -- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["real", "planted"])
def test_the_headline_is_the_recording_s(show, real, which):
    planted = synthetic(waits={("fill", 3, 1): 5 * MS, ("sweep", 6, 2): 11 * MS})
    recording = real if which == "real" else planted
    shown = {name: float(value) for name, (value, _) in figures(show(recording)).items()}
    assert shown["length"] == pytest.approx(step_seconds(recording), rel=1e-9)
    assert shown["hidden"] == pytest.approx(recording.hidden_share, rel=1e-9)
    assert shown["waiting"] == pytest.approx(recording.seconds("wait"), rel=1e-9)
    assert shown["moved"] == recording.nbytes("copy_in") + recording.nbytes("copy_out")
    waits = recording.columns["kind"] == recording.header["kinds"].index("wait")
    assert shown["worst"] == pytest.approx(recording.columns["dur_ns"][waits].max() / 1e9)
    idle = recording.seconds("wait") / step_seconds(recording)
    assert 0.5 < shown["busy"] <= 1 - idle + 1e-9


@pytest.mark.parametrize("which", ["real", "planted"])
def test_what_is_drawn_adds_up_to_the_recording(drive, real, which):
    waits = {("fill", 3, 1): 5 * MS, ("sweep", 6, 2): 11 * MS}
    recording = real if which == "real" else synthetic(waits=waits)
    drawn = drive(recording).evaluate("""() => {
      const sums = {red: 0, copies: 0, compute: {}, overlaps: 0};
      for (const [name, p] of Object.entries(t.lanes.lanes)) for (let i = 0; i < p.length; i++) {
        const time = p.end[i] - p.start[i], kind = t.lanes.kindAt(p.row[i]);
        if (i && p.start[i] < p.end[i - 1]) sums.overlaps++;
        if (name === "compute") sums.compute[kind] = (sums.compute[kind] ?? 0) + time;
        else (sums.copies += time), p.look[i] === -1 && (sums.red += time);
      }
      return sums;
    }""")
    assert drawn["overlaps"] == 0
    copies = recording.seconds("copy_in") + recording.seconds("copy_out")
    assert drawn["copies"] / 1e9 == pytest.approx(copies, rel=1e-9)
    if which == "planted":
        assert 1 - drawn["red"] / drawn["copies"] == pytest.approx(recording.hidden_share, rel=1e-9)
        inside = recording.seconds("attention") - recording.seconds("wait")
        assert drawn["compute"]["attention"] / 1e9 == pytest.approx(inside, rel=1e-9)
        assert drawn["compute"]["mlp"] / 1e9 == pytest.approx(recording.seconds("mlp"), rel=1e-9)
    chunks = recording.seconds("chunk")
    assert sum(drawn["compute"].values()) / 1e9 == pytest.approx(chunks, rel=1e-6)


def test_steps_are_shown_one_by_one_or_together(show):
    first, second = synthetic(waits={("fill", 1, 0): 3 * MS}), synthetic(chunks=5)
    later = {**second.columns, "step": second.columns["step"] + 1}
    later["t_ns"] = later["t_ns"] + 10**9
    columns = {name: np.concatenate([first.columns[name], later[name]]) for name in later}
    both = type(first)({**first.header, "events": len(columns["step"])}, columns)
    page = show(both)
    assert float(figures(page)["length"][0]) == pytest.approx(step_seconds(second))
    page.get_by_label("step", exact=True).select_option("0")
    assert float(figures(page)["length"][0]) == pytest.approx(step_seconds(first))
    assert "fill, chunk 1, layer 0" in sentence(page)
    page.get_by_label("step", exact=True).select_option("")
    assert float(figures(page)["length"][0]) == pytest.approx(1 + step_seconds(second))
    assert float(figures(page)["hidden"][0]) == pytest.approx(both.hidden_share)


def test_waits_that_outlast_the_copies_leave_nothing_hidden(show):
    recording = synthetic(waits={("sweep", 1, 0): 3 * MS})
    copies = np.isin(recording.columns["kind"], [KINDS.index("copy_in"), KINDS.index("copy_out")])
    recording.columns["dur_ns"][copies] //= 1000
    page = show(recording)
    value, shown = figures(page)["hidden"]
    assert float(value) == pytest.approx(recording.hidden_share)
    assert float(value) < 0
    assert shown == "none"


@pytest.mark.parametrize("empty", ["no events", "no copies"])
def test_little_to_show_is_shown(show, empty):
    recorder = Recorder()
    if empty == "no copies":
        config = oomb.EngineConfig(chunk_size=8, page_size=4, recorder=recorder)
        with oomb.Engine(tiny_model("llama", torch.float32), config) as engine:
            engine.step(torch.arange(3, 31)[None])
    page = show(recorder.recording())
    press(page, "n", "ArrowDown", "ArrowRight", "w", "f", "Escape", "Escape")
    assert figures(page)["hidden"][1] == "–"
    assert figures(page)["moved"][1] == "none"


@pytest.mark.parametrize(
    ("source", "badge"),
    [
        ("cuda", "recorded on a GPU"),
        ("cpu", "recorded on a CPU"),
        ("simulated", "simulated copies, on a CPU"),
    ],
)
def test_the_page_says_where_it_comes_from(show, tmp_path, source, badge):
    page = show(synthetic(source=source))
    badges = page.locator(".badge").all_text_contents()
    assert badges == [badge, f"oomb {oomb.__version__}"]
    label = page.locator("canvas").get_attribute("aria-label")
    assert label == f"Timeline. {sentence(page)}"
    assert page.locator("[aria-live=polite]").count() == 1


# -- keys, wheel, pointer -------------------------------------------------------------------------


def test_keys_zoom_and_pan(drive):
    page = drive(synthetic())
    whole = view(page)
    press(page, "w")
    near = view(page)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    press(page, "d")
    later = view(page)
    assert later[0] > near[0] and later[1] - later[0] == pytest.approx(near[1] - near[0])
    press(page, "a")
    assert view(page) == pytest.approx(near)
    press(page, "s")
    assert view(page) == pytest.approx(whole)
    press(page, *"wwwwdd", "0")
    assert view(page) == whole
    press(page, *"S" * 40, *"A" * 40)
    assert view(page) == whole
    press(page, *"w" * 80)
    left, right = view(page)
    assert right - left == pytest.approx(1000)  # nanoseconds
    assert left >= 0 and right <= whole[1]


def test_arrows_walk_through_spans_and_lanes(drive):
    page = drive(synthetic(waits={("sweep", 2, 1): 6 * MS}))
    press(page, "ArrowRight")
    assert sentence(page).startswith("Projection, fill, chunk 0, layer 0: 300 µs, from 0 µs.")
    press(page, "ArrowRight")
    assert sentence(page).startswith("Attention, fill, chunk 0, layer 0: ")
    press(page, "ArrowLeft")
    assert sentence(page).startswith("Projection, fill, chunk 0")
    press(page, "ArrowDown")
    assert sentence(page).startswith("Copy from host to GPU of 4.19 MB, fill, chunk 0, layer 0: ")
    assert sentence(page).endswith("No kernel waited for it.")
    press(page, "ArrowDown", "ArrowDown")
    assert sentence(page).startswith("Copy from GPU to host of 2.10 MB, fill, chunk 0, layer 0: ")
    press(page, "n", "ArrowDown")
    assert sentence(page).endswith("Kernels waited 6.00 ms for it.")
    press(page, "f")
    left, right = view(page)
    assert right - left == pytest.approx(4 * 6 * MS, rel=0.01)
    press(page, "Escape")
    assert sentence(page).startswith("Step 0 took")


def test_help_opens_and_escape_goes_one_step_at_a_time(drive):
    page = drive(synthetic(waits={("sweep", 2, 1): 6 * MS}))
    press(page, "n", "?")
    assert page.get_by_role("dialog").is_visible()
    for _ in range(3):
        assert page.evaluate("document.activeElement.tagName") == "CANVAS"
        page.keyboard.press("Escape")
        assert not page.get_by_role("dialog").is_visible()
    assert page.evaluate("document.activeElement.tagName") == "BODY"


def test_jupyterlab_s_shortcuts_do_not_hear_the_timeline_s_keys(drive):
    page = drive(synthetic())
    page.evaluate(
        "() => { window.heard = []; addEventListener('keydown', (e) => heard.push(e.key)) }"
    )
    press(page, "d", "d", "a", "w", "n", "ArrowDown", "?", "Escape", "x", "Control+s")
    assert page.evaluate("heard") == ["x", "Control", "s"]
    root = page.locator(".oomb-timeline")
    assert root.get_attribute("data-lm-suppress-shortcuts") == "true"


def test_a_plain_wheel_scrolls_the_page_and_with_control_it_zooms(drive):
    page = drive(synthetic())
    page.evaluate("() => document.body.append(Object.assign(document.createElement('div'), "
                  "{style: 'height: 3000px'}))")  # fmt: skip
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 104 + 250, box["y"] + 150)
    whole = view(page)
    page.mouse.wheel(0, 200)
    page.wait_for_function("scrollY > 0")
    assert view(page) == whole
    page.evaluate("scrollTo(0, 0)")
    under = page.evaluate("t._time({clientX: %f})" % (box["x"] + 354))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function("t.state.view.from > 0")
    left, right = view(page)
    assert right - left < 0.7 * (whole[1] - whole[0])
    assert page.evaluate("t._time({clientX: %f})" % (box["x"] + 354)) == pytest.approx(under)
    assert page.evaluate("scrollY") == 0


def drag(page, share, to_share, y=150):
    box = page.locator("canvas").bounding_box()
    wide = int(box["width"]) - GUTTER - RIGHT
    x0, x1 = (box["x"] + GUTTER + s * wide for s in (share, to_share))
    page.mouse.move(x0, box["y"] + y)
    page.mouse.down()
    page.mouse.move((x0 + x1) / 2, box["y"] + y)
    page.mouse.move(x1, box["y"] + y)
    page.mouse.up()
    settle(page)


def table(page):
    rows = page.locator("tbody tr").all()
    return {cells[0]: cells[1:] for cells in (r.locator("td").all_text_contents() for r in rows)}


def test_dragging_counts_what_happened_in_between(drive):
    recording = synthetic(waits={("sweep", 2, 1): 6 * MS})
    page = drive(recording)
    whole = table(page)
    assert whole["mlp"][:2] == ["60", "30.0 ms"]  # 7 x 4 in the fill, 8 x 4 in the sweep
    assert whole["mlp, backward"][:2] == ["32", "16.0 ms"]
    assert whole["waiting for copies"][:2] == ["1", "6.00 ms"]
    assert whole["copy, host to GPU"][-1] == "6.00 ms"
    drag(page, 0.2, 0.6)
    begin, end = page.evaluate("t.state.brush")
    columns, kinds = recording.columns, recording.header["kinds"]
    start = columns["t_ns"] - T0
    clipped = np.minimum(start + columns["dur_ns"], end) - np.maximum(start, begin)
    for kind in ("mlp", "projection"):
        for backward, name in ((0, kind), (1, f"{kind}, backward")):
            chosen = (columns["kind"] == kinds.index(kind)) & (columns["backward"] == backward)
            inside = clipped[chosen & (clipped > 0)]
            count, time = table(page)[name][:2]
            assert int(count) == len(inside)
            assert float(time.split()[0]) == pytest.approx(inside.sum() / 1e6, rel=2e-2)
    assert "Selected: " in page.locator("caption").text_content()
    assert page.evaluate("t.state.view.from") == 0
    page.focus("canvas")
    press(page, "f")
    assert view(page) == pytest.approx([begin, end])
    press(page, "Escape")
    assert table(page) == whole


def test_shift_and_drag_moves_and_the_overview_jumps(drive):
    page = drive(synthetic())
    press(page, "w", "w")
    before = view(page)
    page.keyboard.down("Shift")
    drag(page, 0.5, 0.4)
    page.keyboard.up("Shift")
    by = 0.1 * (before[1] - before[0])
    assert view(page) == pytest.approx([t + by for t in before], rel=0.02)
    drag(page, 0.5, 0.9, y=10)
    _, right = view(page)
    assert right == pytest.approx(page.evaluate("t.lanes.length"), rel=0.03)
    assert page.evaluate("t.state.brush") is None


def test_hovering_and_clicking_tell_what_is_there(drive):
    page = drive(synthetic(waits={("sweep", 4, 2): 9 * MS}))
    press(page, "n")
    page.evaluate("t.state.selected = null")
    box = page.locator("canvas").bounding_box()
    x = box["x"] + GUTTER + (int(box["width"]) - GUTTER - RIGHT) / 2
    page.mouse.move(x, box["y"] + 150)
    tip = page.locator(".tip")
    assert "waiting for copies: 9.00 ms" in tip.text_content()
    assert "sweep, chunk 4, layer 2" in tip.text_content()
    page.mouse.click(x, box["y"] + 215)
    assert sentence(page).startswith("Copy from host to GPU of 4.19 MB, sweep, chunk 4, layer 2: ")
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_the_host_s_lane_unfolds(drive):
    page = drive(synthetic())
    box = page.locator("canvas").bounding_box()
    page.mouse.click(box["x"] + 30, box["y"] + 287)
    settle(page)
    assert page.locator("canvas").bounding_box()["height"] > box["height"]
    ahead = page.evaluate("t.lanes.host.map((p) => p.ahead)")
    assert ahead and set(ahead) == {3 * MS}


# -- looks ----------------------------------------------------------------------------------------


def brightness(page):
    picture = Image.open(io.BytesIO(page.locator("canvas").screenshot())).convert("L")
    return np.median(np.asarray(picture)[60:120])


def test_it_follows_the_reader_s_light_or_dark_also_while_open(show):
    page = show(synthetic())
    light = brightness(page)
    page.emulate_media(color_scheme="dark")
    assert brightness(settle(page)) < 100 < 180 < light


def test_it_follows_jupyterlab_s_theme(drive):
    page = drive(synthetic(), scheme="light")
    ink = page.evaluate("t.painter.theme.ink")
    page.evaluate("""() => {
      const {style} = document.body;
      style.setProperty("--jp-layout-color1", "#111111");
      style.setProperty("--jp-ui-font-color1", "#eeeeee");
    }""")
    settle(page)
    assert page.evaluate("[t.painter.theme.ink, t.painter.theme.ground]") == ["#eeeeee", "#111111"]
    assert ink != "#eeeeee"
    assert brightness(page) < 100


def test_dense_screens_get_their_own_pixels(drive):
    page = drive(synthetic(), device_scale_factor=2)
    drawn, shown = page.evaluate("[t.canvas.width, t.canvas.clientWidth]")
    assert drawn == 2 * shown


def test_motion_is_there_for_who_wants_it(drive, open_page):
    moving = open_page()
    moving.emulate_media(reduced_motion="no-preference")
    page = drive(synthetic(), page=moving)
    page.evaluate("""() => {
      window.views = new Set();
      const look = t._look.bind(t);
      t._look = (view) => { views.add(view.from); look(view) };
    }""")
    press(page, "w")
    page.wait_for_function("t.state.view.from === t.goal.from")
    assert page.evaluate("views.size") > 1
    calm = drive(synthetic())
    press(calm, "w")
    assert calm.evaluate("t.state.view.from === t.goal.from")


# -- much -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large():
    recording = synthetic(chunks=120, layers=24, segments=16, waits={("sweep", 60, 7): 9 * MS})
    assert len(recording) > 300_000
    return recording


def test_three_hundred_thousand_events_open_and_zoom(drive, large):
    page = drive(large)
    assert float(figures(page)["length"][0]) == pytest.approx(step_seconds(large), rel=1e-9)
    assert page.evaluate("t.painter.thin.compute.perColumn") > 20
    assert len(red_columns(page)[0]) in (1, 2)
    press(page, "n")
    assert "sweep, chunk 60, layer 7" in sentence(page)
    assert page.evaluate("t.painter.thin.compute.perColumn") == 0
    red, wide = red_columns(page)
    assert len(red) > 0.05 * wide
    press(page, "0", *"w" * 12)
    assert view(page)[1] - view(page)[0] < large.columns["dur_ns"].max() / 1000


def test_columns_of_a_thinned_lane_hold_the_time_that_was_spent(drive, large):
    page = drive(large)
    spent, drawn, width = page.evaluate("""() => {
      const p = t.lanes.lanes.compute, width = 700;
      const sum = (xs) => xs.reduce((a, b) => a + b, 0);
      const {from, to} = {from: t.lanes.length * 0.31, to: t.lanes.length * 0.74};
      const {shares, thin} = parts.thinned(p, {from, to, width});
      const spent = {}, drawn = {};
      for (let i = 0; i < p.length; i++) {
        const time = Math.min(p.end[i], to) - Math.max(p.start[i], from);
        if (time > 0) spent[p.look[i]] = (spent[p.look[i]] ?? 0) + time / (to - from) * width;
      }
      for (const [look, own] of shares) drawn[look] = sum([...own]);
      return [spent, drawn, sum([...thin])];
    }""")
    assert width == 700
    assert drawn == pytest.approx(spent, rel=1e-6)


# -- the file -------------------------------------------------------------------------------------


def test_the_page_carries_the_recording(real, tmp_path):
    text = write_html(real, tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "out.oomb").write_bytes(base64.b64decode(PACKED.search(text)[1]))
    loaded = load_recording(tmp_path / "out.oomb")
    for name, column in real.columns.items():
        assert np.array_equal(loaded.columns[name], column)
    assert not re.search(r"""(src|href)\s*=\s*["']?https?:|import\s*\(?["']""", text)


def test_a_title_is_text(show, open_page, tmp_path):
    recording, title = synthetic(), 'a </script><img src=x> & "b"'
    page = open_page()
    page.goto(write_html(recording, tmp_path / "page.html", title).as_uri())
    page.wait_for_selector("canvas")
    assert page.title() == page.locator("h1").text_content() == title


def test_a_crash_while_writing_leaves_what_was_there(real, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_html(real, path)
    assert path.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"]


def test_moments_too_large_for_a_double_stay_exact(drive):
    recording = synthetic()
    page = drive(recording)
    assert page.evaluate("[...t.recording.columns.t_ns]") == [
        int(t) - T0 for t in recording.columns["t_ns"]
    ]
    assert page.evaluate("t.recording.columns.t_ns[0]") == 0
    for name in ("waits_on", "nbytes", "number"):
        assert page.evaluate(f"[...t.recording.columns.{name}]") == [*recording.columns[name]]
    recording.columns["enqueue_ns"][5] = NONE
    assert np.isnan(drive(recording).evaluate("t.recording.columns.enqueue_ns[5]"))


def read_in(page, body):
    """The error with which the page refuses a file's bytes; None if it reads them."""
    return page.evaluate(
        """(text) => parts.readRecording(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)))
           .then(() => null, (error) => error.message)""",
        base64.b64encode(body).decode(),
    )


def test_files_that_are_no_recording_are_refused(drive, real, tmp_path):
    page = drive(real)
    whole = base64.b64decode(page.evaluate("window.packed"))
    assert read_in(page, whole) is None
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def packed(changes, method=zipfile.ZIP_DEFLATED):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for name, body in {**members, **changes}.items():
                archive.writestr(name, body)
        return buffer.getvalue()

    assert read_in(page, packed({}, zipfile.ZIP_STORED)) is None
    assert read_in(page, packed({"events/joules.npy": members["events/t_ns.npy"]})) is None
    assert "no oomb recording" in read_in(page, b"")
    assert "no oomb recording" in read_in(page, b"x" * 5000)
    assert "no oomb recording" in read_in(page, packed({"header.json": b" " * (2 << 20)}))
    assert "larger than its" in read_in(page, packed({"events/t_ns.npy": b"0" * (8 << 20)}))
    assert "packed in a way" in read_in(page, packed({}, zipfile.ZIP_BZIP2))
    words = io.BytesIO()
    np.save(words, np.array(["a"] * len(real)))
    assert "has a column of" in read_in(page, packed({"events/layer.npy": words.getvalue()}))
    short = io.BytesIO()
    np.save(short, np.zeros(3, "<i4"))
    assert "has 3 rows, not" in read_in(page, packed({"events/layer.npy": short.getvalue()}))


def test_a_damaged_recording_is_one_sentence_on_the_page(browser, real, tmp_path):
    path = write_html(real, tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    path.write_text(PACKED.sub('id="recording">AAAA<', text), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("[role=alert]")
    expected = "The timeline cannot be drawn: this is no oomb recording."
    assert page.get_by_role("alert").text_content() == expected
    page.close()


def test_arrays_handed_over_are_drawn_as_the_file_is(drive):
    recording = synthetic(waits={("sweep", 3, 1): 5 * MS})
    page = drive(recording)
    said, shown = sentence(page), figures(page)
    columns = {
        name: [column.dtype.str, base64.b64encode(column.tobytes()).decode()]
        for name, column in recording.columns.items()
    }
    page.evaluate(
        """async ([header, columns]) => {
          const arrays = {"<i8": BigInt64Array, "<i4": Int32Array, "|i1": Int8Array};
          const made = Object.fromEntries(Object.entries(columns).map(([name, [dtype, text]]) =>
            [name, new arrays[dtype](Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer)]));
          const make = t.constructor, root = document.getElementById("here");
          t.close();
          window.t = new make(root, parts.fromArrays(header, made), {});
        }""",
        [recording.header, columns],
    )
    assert (sentence(page), figures(page)) == (said, shown)


def test_the_modules_load_as_they_are(browser, real, tmp_path):
    """Served as files, without being joined into one."""
    page = browser.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    types = {".js": "text/javascript", ".json": "application/json", ".html": "text/html"}
    start = """<main id="here"></main><script type="module">
      import {timeline} from "./timeline.js";
      const bytes = new Uint8Array(await (await fetch("run.oomb")).arrayBuffer());
      await timeline(document.getElementById("here"), bytes);</script>"""
    recorded = synthetic()
    text = write_html(recorded, tmp_path / "page.html").read_text(encoding="utf-8")

    def serve(route):
        name = route.request.url.rsplit("/", 1)[1]
        bodies = {"start.html": start, "run.oomb": base64.b64decode(PACKED.search(text)[1])}
        body = bodies[name] if name in bodies else (WEB / name).read_text(encoding="utf-8")
        route.fulfill(body=body, content_type=types.get(Path(name).suffix, "application/zip"))

    page.route("http://localhost/**", serve)
    page.goto("http://localhost/start.html")
    page.wait_for_selector("canvas")
    assert float(figures(page)["length"][0]) == pytest.approx(step_seconds(recorded))
    assert complaints == []
    page.close()


def test_ticks_are_round_and_in_one_unit(drive):
    page = drive(synthetic())
    for begin, end in [(0, 2.1e9), (1.0953e9, 1.1957e9), (0, 950), (5e6, 5.02e6), (0, 3.7e12)]:
        marks = page.evaluate(f"parts.ticks({begin}, {end}, 9)")
        assert 3 <= len(marks) <= 11
        assert len({mark["text"] for mark in marks}) == len(marks)
        assert len({mark["text"].split()[1] for mark in marks}) == 1
        steps = [b["at"] - a["at"] for a, b in pairwise(marks)]
        assert max(steps) == pytest.approx(min(steps))
        units = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}
        for mark in marks:
            number, unit = mark["text"].split()
            assert float(number) * units[unit] == pytest.approx(mark["at"], abs=1e-3)
