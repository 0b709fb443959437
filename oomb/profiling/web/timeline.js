// A recording's timeline: who computes, what is copied, and who waits for whom.

import ENCODING from "./encoding.json" with { type: "json" };
import { RED, placeOf, readLanes, stepsOf } from "./lanes.js";
import { fromArrays, readRecording } from "./npy.js";
import { headlineOf, helpElement, legendOf, make, stageName, tableElement } from "./page.js";
import { GUTTER, Painter, layout, plotWidth, themeOf } from "./paint.js";
import { causeWords, description, summary } from "./sentences.js";
import { STYLE } from "./style.js";
import { duration, rate, size } from "./words.js";

const LANES = ["compute", "copy_in", "copy_out"];
const NARROWEST_NS = 1000;
const MOTION_MS = 160;
const SOURCES = {
  cuda: "recorded on a GPU", cpu: "recorded on a CPU", simulated: "simulated copies, on a CPU",
};

/**
 * Draws a recording into an element.
 *
 * @param {HTMLElement} root an element of the page; what it holds is replaced
 * @param {ArrayBuffer|Uint8Array|{header: object, columns: object}} recording the bytes of a
 *   run.oomb, or its header and a typed array per column (int64 as BigInt64Array)
 * @param {{title?: string, version?: string, onCursor?: (place: object) => void}} options
 *   onCursor is told {row, phase, chunk, layer, t_ns} of each span that is selected
 * @returns {Promise<{close: () => void}>} resolved once it is drawn
 */
export async function timeline(root, recording, options = {}) {
  root.replaceChildren(make("p", {}, "Reading the recording …"));
  try {
    const read = recording.columns
      ? fromArrays(recording.header, recording.columns)
      : await readRecording(new Uint8Array(recording));
    return new Timeline(root, read, options);
  } catch (error) {
    root.replaceChildren(make("p", { role: "alert" }, `The timeline cannot be drawn: ${error.message}.`));
    throw error;
  }
}

class Timeline {
  constructor(root, recording, options) {
    this.recording = recording, this.options = options, this.root = root;
    this.steps = stepsOf(recording);
    this.state = { view: null, hostOpen: false, selected: null, brush: null, lane: "compute", focused: false };
    this.worst = -1; // place of the selected wait among the waits
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.stop = new AbortController();
    this._build();
    this.painter = new Painter(this.canvas, ENCODING);
    this._listen();
    this.show(this.steps.length ? this.steps[this.steps.length - 1] : null);
  }

  close() {
    this.stop.abort();
    this.resized.disconnect(), this.themed.disconnect();
    cancelAnimationFrame(this.frame), cancelAnimationFrame(this.moving);
    this.root.replaceChildren();
  }

  /** One step, or with null the whole recording. */
  show(step) {
    this.lanes = readLanes(this.recording, ENCODING, step);
    this.state.view = this.goal = this._all();
    this.state.selected = this.state.brush = null;
    this.worst = -1;
    this.figures.replaceChildren(headlineOf(this.lanes));
    this.legend.replaceChildren(legendOf(this.lanes, ENCODING));
    this.nextWait.disabled = !this.lanes.waits.length;
    const sentence = summary(this.lanes);
    this.canvas.setAttribute("aria-label", `Timeline. ${sentence}`);
    this._say(sentence);
    this._fillTable();
    this._paintSoon();
  }

  _build() {
    const { header } = this.recording, { title = "Timeline", version } = this.options;
    const button = (text, label, act) => {
      const element = make("button", { type: "button", "aria-label": label, title: label }, text);
      element.addEventListener("click", act);
      return element;
    };
    const names = [...this.steps.map((step) => [String(step), `step ${step}`]), ["", "all steps"]];
    const chooser = make("select", { "aria-label": "step" },
      ...names.map(([value, name]) => make("option", { value }, name)));
    chooser.value = String(this.steps[this.steps.length - 1] ?? "");
    chooser.addEventListener("change", () => this.show(chooser.value === "" ? null : Number(chooser.value)));
    this.nextWait = button("next wait", "next worst wait (n)", () => this.goToWait(1));
    this.canvas = make("canvas", { tabindex: "0", role: "application" });
    this.figures = make("div"), this.legend = make("div"), this.table = make("div");
    this.sentence = make("p", { class: "sentence", "aria-live": "polite" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.help = helpElement();
    const page = make("section", { class: "oomb-timeline", "data-lm-suppress-shortcuts": "true" },
      make("style", {}, STYLE),
      make("header", {},
        make("h1", {}, title),
        make("span", { class: "badge" }, SOURCES[header.source] ?? header.source),
        version ? make("span", { class: "badge" }, `oomb ${version}`) : null,
        make("div", { class: "tools" },
          this.steps.length > 1 ? chooser : null,
          button("−", "zoom out (S)", () => this.zoom(2)),
          button("+", "zoom in (W)", () => this.zoom(0.5)),
          button("all", "show all (0)", () => this.moveTo(this._all())),
          this.nextWait,
          button("?", "keys (?)", () => this._toggleHelp()))),
      this.figures, this.legend, this.canvas, this.sentence, this.table, this.tip, this.help);
    this.page = page;
    this.root.replaceChildren(page);
  }

  _listen() {
    const { signal } = this.stop;
    const on = (target, name, act, more = {}) => target.addEventListener(name, act, { signal, ...more });
    on(this.canvas, "keydown", (event) => this._key(event));
    on(this.canvas, "focus", () => ((this.state.focused = true), this._paintSoon()));
    on(this.canvas, "blur", () => ((this.state.focused = false), this._paintSoon()));
    on(this.canvas, "wheel", (event) => this._wheel(event), { passive: false });
    on(this.canvas, "pointerdown", (event) => this._press(event));
    on(this.canvas, "pointermove", (event) => this._hover(event));
    on(this.canvas, "pointerleave", () => (this.tip.hidden = true));
    on(this.canvas, "dblclick", (event) => this._pick(event) && this.fit());
    on(this.help, "click", () => this._toggleHelp(false));
    for (const query of ["(prefers-color-scheme: dark)", "(resolution: 1dppx)"]) {
      on(matchMedia(query), "change", () => this._paintSoon());
    }
    this.resized = new ResizeObserver(() => this._paintSoon());
    this.resized.observe(this.canvas);
    this.themed = new MutationObserver(() => this._paintSoon()); // JupyterLab's theme
    this.themed.observe(document.body, { attributes: true });
  }

  // -- what is in view

  get cssWidth() {
    return this.canvas.clientWidth || 900;
  }

  _all() {
    return { from: 0, to: this.lanes.length };
  }

  /** Goes there, by a short motion unless the reader asked for none. */
  moveTo(view) {
    const least = Math.min(NARROWEST_NS, this.lanes.length);
    const span = Math.min(Math.max(view.to - view.from, least), this.lanes.length);
    const from = Math.min(Math.max(view.from, 0), this.lanes.length - span);
    const goal = { from, to: from + span }, start = { ...this.state.view }, began = performance.now();
    this.goal = goal;
    cancelAnimationFrame(this.moving);
    this.tip.hidden = true;
    if (this.calm.matches) return this._look(goal);
    const move = () => {
      const share = Math.min((performance.now() - began) / MOTION_MS, 1), eased = 1 - (1 - share) ** 3;
      const between = (a, b) => a + (b - a) * eased;
      this._look(share === 1 ? goal : { from: between(start.from, goal.from), to: between(start.to, goal.to) });
      if (share < 1) this.moving = requestAnimationFrame(move);
    };
    move();
  }

  _look(view) {
    this.state.view = view;
    this._paintSoon();
  }

  zoom(factor, around = null) {
    const view = this.goal ?? this.state.view;
    const { selected } = this.state;
    const middle = around ?? (selected ? clamp(this._span(selected).middle, view) : (view.from + view.to) / 2);
    this.moveTo({ from: middle - (middle - view.from) * factor, to: middle + (view.to - middle) * factor });
  }

  pan(share) {
    const view = this.goal ?? this.state.view, by = share * (view.to - view.from);
    this.moveTo({ from: view.from + by, to: view.to + by });
  }

  fit() {
    const { brush, selected } = this.state;
    if (!brush && !selected) return this.moveTo(this._all());
    const [from, to] = brush ?? [this._span(selected).start, this._span(selected).end];
    const room = brush ? 0 : (to - from) * 1.5;
    this.moveTo({ from: from - room, to: to + room });
  }

  // -- what is selected

  _span({ lane, i }) {
    const pieces = this.lanes.lanes[lane];
    const [start, end] = [pieces.start[i], pieces.end[i]];
    return { start, end, middle: (start + end) / 2, row: pieces.row[i] };
  }

  select(lane, i) {
    this.state.selected = { lane, i }, (this.state.lane = lane);
    const { start, end, row } = this._span({ lane, i }), { from, to } = this.goal ?? this.state.view;
    if (start < from || end > to) {
      const half = Math.max(to - from, (end - start) * 1.4) / 2, middle = (start + end) / 2;
      this.moveTo({ from: middle - half, to: middle + half });
    }
    this.worst = this.lanes.waits.findIndex((wait) => wait.row === row);
    this._say(description(this.lanes, row));
    const { header, columns } = this.recording;
    const known = (value) => (value === -1 ? null : value);
    this.options.onCursor?.({
      row, phase: header.phases[columns.phase[row]] ?? null,
      chunk: known(columns.chunk[row]), layer: known(columns.layer[row]), t_ns: start + this.lanes.origin,
    });
    this._paintSoon();
  }

  goToWait(by) {
    const { waits, lanes } = this.lanes;
    if (!waits.length) return this._say("Nothing waited for a copy.");
    const next = this.worst < 0 ? (by > 0 ? 0 : waits.length - 1) : (this.worst + by + waits.length) % waits.length;
    const wait = waits[next];
    const room = Math.max(wait.ns * 6, NARROWEST_NS), middle = (wait.start + wait.end) / 2;
    this.moveTo({ from: middle - room, to: middle + room });
    this.select("compute", lanes.compute.at(middle));
    this.worst = next;
    this._say(description(this.lanes, wait.row));
  }

  _walk(by) {
    const { lane, selected, view } = this.state, pieces = this.lanes.lanes[lane];
    if (!pieces.length) return this._say(`Nothing happened in the lane ${ENCODING.labels[lane]}.`);
    const now = selected?.lane === lane ? selected.i + by : pieces.after(by > 0 ? view.from : view.to) - (by > 0 ? 0 : 1);
    this.select(lane, clamp(now, { from: 0, to: pieces.length - 1 }));
  }

  _changeLane(by) {
    const next = clamp(LANES.indexOf(this.state.lane) + by, { from: 0, to: LANES.length - 1 });
    const { selected, view } = this.state;
    const t = selected ? this._span(selected).middle : (view.from + view.to) / 2;
    this.state.lane = LANES[next];
    const pieces = this.lanes.lanes[this.state.lane];
    if (pieces.length) this.select(this.state.lane, Math.min(pieces.after(t), pieces.length - 1));
    else this._say(`Nothing happened in the lane ${ENCODING.labels[this.state.lane]}.`);
    this._paintSoon();
  }

  // -- in words

  _say(text) {
    this.sentence.textContent = text;
  }

  // -- keys, wheel and pointer

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      w: () => this.zoom(0.5), s: () => this.zoom(2), a: () => this.pan(-0.3), d: () => this.pan(0.3),
      arrowleft: () => this._walk(-1), arrowright: () => this._walk(1),
      arrowup: () => this._changeLane(-1), arrowdown: () => this._changeLane(1),
      n: () => this.goToWait(event.key === "N" ? -1 : 1), f: () => this.fit(), 0: () => this.moveTo(this._all()),
      "?": () => this._toggleHelp(), escape: () => this._escape(),
    }[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault(), event.stopPropagation();
    act();
  }

  _escape() {
    if (!this.help.hidden) return this._toggleHelp(false);
    if (!this.state.brush && !this.state.selected) return this.canvas.blur();
    const brushed = this.state.brush;
    this.state.brush = this.state.selected = null;
    this.worst = -1;
    if (brushed) this._fillTable();
    this._say(summary(this.lanes));
    this._paintSoon();
  }

  _toggleHelp(open = this.help.hidden) {
    this.help.hidden = !open;
    this.canvas.focus({ preventScroll: true });
  }

  _wheel(event) {
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(clamp(event.deltaY, { from: -200, to: 200 }) / 250), this._time(event));
    } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      event.preventDefault();
      this.pan(sideways / 800);
    } // a plain wheel scrolls the page
  }

  _time(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left - GUTTER;
    const { from, to } = this.state.view;
    return from + (x / plotWidth(this.cssWidth)) * (to - from);
  }

  _row(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top, at = layout(this.state.hostOpen);
    return Object.keys(at).find((name) => y >= at[name].y - 2 && y < at[name].y + at[name].height + 4);
  }

  _press(event) {
    if (event.button > 1) return;
    const row = this._row(event), began = this._time(event);
    if (row === "host" && event.offsetX < GUTTER) {
      this.state.hostOpen = !this.state.hostOpen;
      return this._paintSoon();
    }
    const start = { ...this.state.view }, width = plotWidth(this.cssWidth);
    const overview = row === "overview", drags = event.shiftKey || event.button === 1;
    const follow = new AbortController();
    let moved = false;
    const center = (e) => {
      const x = e.clientX - this.canvas.getBoundingClientRect().left - GUTTER;
      const half = (start.to - start.from) / 2, t = (x / width) * this.lanes.length;
      this.calmly(() => this.moveTo({ from: t - half, to: t + half }));
    };
    if (overview) center(event);
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", (e) => {
      if (Math.abs(e.clientX - event.clientX) < 4 && !moved) return;
      moved = true;
      if (overview) return center(e);
      if (drags) {
        const by = ((event.clientX - e.clientX) / width) * (start.to - start.from);
        return this.calmly(() => this.moveTo({ from: start.from + by, to: start.to + by }));
      }
      const now = this._time(e);
      this.state.brush = [Math.max(0, Math.min(began, now)), Math.min(this.lanes.length, Math.max(began, now))];
      this._paintSoon();
    }, { signal: follow.signal });
    const end = () => {
      follow.abort();
      if (overview || drags) return;
      if (moved) this._brushed();
      else if (!this._pick(event)) this._escape();
    };
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, end, { signal: follow.signal });
  }

  /** Without motion: the pointer is the motion. */
  calmly(act) {
    const { calm } = this;
    this.calm = { matches: true };
    act();
    this.calm = calm;
  }

  _brushed() {
    const [from, to] = this.state.brush;
    if (to <= from) return void (this.state.brush = null);
    this._fillTable();
    const waits = this.lanes.waits.filter((wait) => wait.end > from && wait.start < to);
    const waited = waits.reduce((sum, wait) => sum + Math.min(wait.end, to) - Math.max(wait.start, from), 0);
    const lost = waits.length ? `kernels waited ${duration(waited)} in it, the longest in ${placeOf(this.recording, waits[0].row)}` : "nothing waited in it";
    this._say(`Selected ${duration(to - from)}: ${lost}.`);
  }

  /** Selects what is under the pointer; whether there was anything. */
  _pick(event) {
    const found = this._under(event);
    if (found) this.select(found.lane, found.i);
    return Boolean(found);
  }

  _under(event) {
    const lane = this._row(event), pieces = this.lanes.lanes[lane];
    if (!pieces || event.offsetX < GUTTER) return null;
    const t = this._time(event), near = (2 * (this.state.view.to - this.state.view.from)) / plotWidth(this.cssWidth);
    // A wait a pixel wide is easily missed by the hand.
    const first = pieces.after(t - near);
    for (let i = first; i < pieces.length && pieces.start[i] <= t + near; i++) {
      if (pieces.look[i] === RED || this.lanes.kindAt(pieces.row[i]) === "wait") return { lane, i };
    }
    const i = pieces.at(t);
    return i < 0 ? null : { lane, i };
  }

  _hover(event) {
    const found = event.buttons ? null : this._under(event);
    this.tip.hidden = !found;
    if (!found) return;
    const { start, end, row } = this._span(found), { columns } = this.recording;
    const kind = this.lanes.kindAt(row), wait = this.lanes.waits.find((w) => w.row === row || w.copy === row);
    const lines = [make("b", {}, `${stageName(kind)}${columns.backward[row] ? ", backward" : ""}: ${duration(columns.dur_ns[row])}`),
      make("span", { class: "place" }, placeOf(this.recording, row))];
    if (columns.nbytes?.[row] > 0) {
      const bytes = columns.nbytes[row], speed = rate(bytes, columns.dur_ns[row]);
      lines.push(make("span", { class: "place" }, `${size(bytes)} at ${speed}`));
    }
    if (wait) {
      const long = kind === "wait" ? "" : `${duration(wait.ns)} of waiting: `;
      lines.push(make("span", { class: "wait" }, long + causeWords(wait)));
    }
    const thin = this.painter.thin[found.lane], x = Math.floor(this.painter.x(this._time(event)));
    if (thin.thin[x]) lines.push(make("span", { class: "note" }, `one of ${thin.spans[x]} spans in this pixel`));
    else if (end - start < columns.dur_ns[row] * 0.99) lines.push(make("span", { class: "note" }, `this piece: ${duration(end - start)}`));
    this.tip.replaceChildren(...lines);
    const box = this.page.getBoundingClientRect(), wide = this.tip.offsetWidth;
    const left = event.clientX - box.left + 14;
    this.tip.style.left = `${Math.min(left, box.width - wide - 4)}px`;
    this.tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  // -- drawing

  _fillTable() {
    const { brush } = this.state, [from, to] = brush ?? [0, this.lanes.length];
    this.table.replaceChildren(tableElement(this.lanes, ENCODING, from, to, Boolean(brush)));
  }

  _paintSoon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.painter.paint(this.lanes, this.state, themeOf(this.page), this.cssWidth);
    });
  }
}

function clamp(x, { from, to }) {
  return Math.min(Math.max(x, from), to);
}
