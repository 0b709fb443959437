// Draws the lanes on a canvas.

import { RED, familyNames } from "./lanes.js";
import { thinned } from "./thin.js";
import { duration, ticks } from "./words.js";

export const GUTTER = 104;
const RIGHT = 14;
const FONT = "11px system-ui, -apple-system, 'Segoe UI', sans-serif";
const ON_HUE = "#101418"; // text on any of the families' colours
const PALE = 0.5;
const LABELLED_WAITS = 12;
const LEAST_RED = 3; // pixels of a column in which something waited, however short
const BANDS = { phase: [0.3], chunk: [0.24, 0.14], layer: [0.16, 0.08] }; // opacity, by turns

/** Top and height of everything, in CSS pixels. */
export function layout(hostOpen) {
  return {
    overview: { y: 4, height: 16 },
    axis: { y: 24, height: 18 },
    phase: { y: 44, height: 18 },
    chunk: { y: 64, height: 18 },
    layer: { y: 84, height: 14 },
    flags: { y: 102, height: 16 },
    compute: { y: 118, height: 64 },
    copy_in: { y: 200, height: 30 },
    copy_out: { y: 240, height: 30 },
    host: { y: 280, height: hostOpen ? 44 : 14 },
    total: hostOpen ? 330 : 300,
  };
}

/** Width of the part that time runs through. */
export function plotWidth(cssWidth) {
  return Math.max(40, Math.floor(cssWidth - GUTTER - RIGHT));
}

/** What an element's style sheet says about colours, resolved. */
export function themeOf(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(name).trim();
  return { ink: value("--ink"), soft: value("--soft"), faint: value("--faint"), ground: value("--ground") };
}

export class Painter {
  constructor(canvas, encoding) {
    this.canvas = canvas;
    this.encoding = encoding;
    this.families = familyNames(encoding);
    this.context = canvas.getContext("2d");
  }

  /** state: {view, hostOpen, selected: {lane, i}|null, brush: [from, to]|null, lane, focused} */
  paint(lanes, state, theme, cssWidth) {
    this.theme = theme, this.lanes = lanes, this.state = state;
    this.at = layout(state.hostOpen);
    this.width = plotWidth(cssWidth);
    const ratio = globalThis.devicePixelRatio || 1;
    const [width, height] = [Math.round(cssWidth * ratio), Math.round(this.at.total * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width, this.canvas.height = height;
      this.canvas.style.height = `${this.at.total}px`;
    }
    if (this.ratio !== ratio || this.hatchOf !== theme.ground) {
      this.ratio = ratio, this.hatchOf = theme.ground;
      this.hatch = hatching(this.context, theme.ground, ratio);
    }
    const c = this.context;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, cssWidth, this.at.total);
    c.font = FONT, c.textBaseline = "middle", c.lineWidth = 1;
    this._labels();
    c.save();
    c.translate(GUTTER, 0);
    this._overview();
    c.beginPath(), c.rect(-1, 0, this.width + 2, this.at.total), c.clip();
    this._axis();
    for (const kind of ["phase", "chunk", "layer"]) this._band(kind);
    this.thin = {};
    for (const lane of ["compute", "copy_in", "copy_out"]) this._lane(lane);
    this._flags();
    if (state.hostOpen) this._host();
    this._arrows();
    this._brush();
    this._selected();
    c.restore();
  }

  x(t) {
    const { from, to } = this.state.view;
    return ((t - from) / (to - from)) * this.width;
  }

  _labels() {
    const c = this.context, { labels } = this.encoding;
    const write = (row, text, colour) => {
      c.fillStyle = colour;
      c.fillText(text, 2, this.at[row].y + this.at[row].height / 2 + 0.5);
    };
    write("overview", "all", this.theme.soft);
    for (const band of ["phase", "chunk", "layer"]) write(band, band, this.theme.soft);
    for (const lane of ["compute", "copy_in", "copy_out"]) {
      const here = this.state.focused && this.state.lane === lane;
      write(lane, (here ? "▸ " : "") + labels[lane], this.theme.ink);
    }
    write("host", (this.state.hostOpen ? "▾ " : "▸ ") + labels.host, this.theme.soft);
  }

  _axis() {
    const c = this.context, { view } = this.state;
    const { y, height } = this.at.axis;
    for (const { at, text } of ticks(view.from, view.to, this.width / 110)) {
      const x = Math.round(this.x(at)) + 0.5;
      c.fillStyle = this.theme.faint;
      c.fillRect(x - 0.5, y + height, 1, this.at.host.y - y - height - 4);
      c.fillStyle = this.theme.soft;
      const wide = c.measureText(text).width;
      c.fillText(text, Math.min(Math.max(0, x - wide / 2), this.width - wide), y + height / 2);
    }
  }

  /** A row of containers, each with its number where that has room. */
  _band(kind) {
    const c = this.context, pieces = this.lanes.bands[kind], at = this.at[kind], { y, height } = at;
    const { header, columns } = this.lanes.recording;
    const colours = this.encoding.colours;
    const { from, to } = this.state.view;
    if (pieces.after(to) - pieces.after(from) > this.width / 4) return this._flat(at);
    for (let i = pieces.after(from); i < pieces.length && pieces.start[i] < to; i++) {
      const row = pieces.row[i];
      const x0 = Math.max(this.x(pieces.start[i]), 0), x1 = Math.min(this.x(pieces.end[i]), this.width);
      const phase = header.phases[columns.phase[row]];
      c.globalAlpha = BANDS[kind][kind === "phase" ? 0 : columns[kind][row] % 2];
      c.fillStyle = colours[phase] ?? this.theme.soft;
      c.fillRect(x0, y, Math.max(x1 - x0 - 1, 0.5), height);
      c.globalAlpha = 1;
      const text = kind === "phase" ? phase : `${kind} ${columns[kind][row]}`;
      this._inside([text, text.split(" ")[1]], x0, x1, y, height, this.theme.ink);
    }
  }

  /** A row whose containers are too narrow to tell apart. */
  _flat({ y, height }) {
    const c = this.context, { phase } = this.lanes.bands;
    const { header, columns } = this.lanes.recording;
    c.globalAlpha = 0.16;
    for (let i = 0; i < phase.length; i++) {
      c.fillStyle = this.encoding.colours[header.phases[columns.phase[phase.row[i]]]] ?? this.theme.soft;
      c.fillRect(this.x(phase.start[i]), y, this.x(phase.end[i]) - this.x(phase.start[i]), height);
    }
    c.globalAlpha = 1;
  }

  /** The first of the texts that fits between x0 and x1. */
  _inside(texts, x0, x1, y, height, colour) {
    const c = this.context;
    if (x1 - x0 < 10) return;
    for (const text of texts) {
      if (!text) continue;
      const wide = c.measureText(text).width;
      if (wide + 6 > x1 - x0) continue;
      c.fillStyle = colour;
      c.fillText(text, (x0 + x1 - wide) / 2, y + height / 2 + 0.5);
      return;
    }
  }

  _lane(name) {
    const c = this.context, pieces = this.lanes.lanes[name], at = this.at[name];
    c.fillStyle = this.theme.faint;
    c.fillRect(0, at.y + at.height, this.width, 1);
    const thin = (this.thin[name] = thinned(pieces, { ...this.state.view, width: this.width }));
    this._columns(thin, at, name !== "compute");
    // Waits last: nothing may cover them.
    const red = (i) => this._isRed(pieces.look[i]);
    for (const i of thin.wide) if (!red(i)) this._piece(name, pieces, i);
    for (const i of thin.wide) if (red(i)) this._piece(name, pieces, i);
    if (thin.perColumn >= 1.5) this._thinNote(thin.perColumn, at);
  }

  _isRed(look) {
    return look === RED || look >> 1 === this.families.length - 1;
  }

  _piece(lane, pieces, i) {
    const c = this.context, look = pieces.look[i], { y, height } = this.at[lane];
    const x0 = this.x(pieces.start[i]), x1 = this.x(pieces.end[i]);
    const wide = Math.max(x1 - x0, 1), left = Math.max(x0, -4);
    const seen = Math.min(x0 + wide, this.width + 4) - left;
    if (this._isRed(look)) {
      const colour = this.encoding.colours.wait;
      c.fillStyle = colour;
      if (lane !== "compute" || seen < 4) return void c.fillRect(left, y, Math.max(seen, 1), height);
      c.clearRect(left, y, seen, height);
      c.globalAlpha = 0.16, c.fillRect(left, y, seen, height), (c.globalAlpha = 1);
      c.strokeStyle = colour, c.lineWidth = 1.5;
      c.strokeRect(left + 0.75, y + 0.75, seen - 1.5, height - 1.5);
      return;
    }
    const copy = lane !== "compute";
    const gap = seen > 3 ? 0.6 : 0;
    if (copy) c.clearRect(left, y, Math.max(seen - gap, 0.75), height); // pale on pale adds up
    this._fill(look, left, y, Math.max(seen - gap, 0.75), height, copy);
    const name = this.families[look >> 1];
    if (!copy && name !== "other") {
      const kind = this.lanes.kindAt(pieces.row[i]);
      const text = (look & 1 && ["attention", "mlp", "projection"].includes(kind)) ? [`${kind} backward`, kind] : [kind];
      this._inside(text, Math.max(x0, 0), Math.min(x1, this.width), y, height, ON_HUE);
    }
  }

  _fill(look, x, y, width, height, pale) {
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this._fillPath(look, pale);
  }

  _fillPath(look, pale) {
    const c = this.context, name = this.families[look >> 1];
    c.globalAlpha = pale ? PALE : name === "other" ? 0.3 : 1;
    c.fillStyle = this.encoding.colours[name];
    c.fill();
    c.globalAlpha = 1;
    if (look & 1) (c.fillStyle = this.hatch), c.fill();
  }

  /** Stacked shares of each thinned column; waits hang from the top, never too little to see. */
  _columns({ thin, shares }, { y, height }, pale) {
    const c = this.context, looks = [...shares.keys()].sort((a, b) => a - b);
    const red = looks.filter((look) => this._isRed(look));
    const busy = looks.filter((look) => !this._isRed(look));
    const bottoms = new Float64Array(this.width).fill(y + height);
    for (let x = 0; x < this.width; x++) if (thin[x]) c.clearRect(x, y, 1, height);
    for (const look of busy) {
      const own = shares.get(look);
      c.beginPath();
      for (let x = 0; x < this.width; x++) {
        if (own[x] > 0) c.rect(x, (bottoms[x] -= own[x] * height), 1, own[x] * height);
      }
      this._fillPath(look, pale);
    }
    c.fillStyle = this.encoding.colours.wait;
    for (let x = 0; x < this.width; x++) {
      const share = red.reduce((sum, look) => sum + shares.get(look)[x], 0);
      if (share > 0) c.fillRect(x, y, 1, Math.max(share * height, LEAST_RED));
    }
  }

  _thinNote(perColumn, { y, height }) {
    const c = this.context, text = `1 px = ${Math.max(2, Math.round(perColumn))} spans`;
    const wide = c.measureText(text).width + 8;
    c.globalAlpha = 0.85, c.fillStyle = this.theme.ground;
    c.fillRect(this.width - wide, y + height - 14, wide, 14);
    c.globalAlpha = 1, c.fillStyle = this.theme.soft;
    c.fillText(text, this.width - wide + 4, y + height - 6.5);
  }

  /** The longest waits in view with their time, above the lane, as many as have room. */
  _flags() {
    const c = this.context, { y, height } = this.at.flags, { from, to } = this.state.view;
    const taken = [], colour = this.encoding.colours.wait;
    let left = LABELLED_WAITS;
    for (const wait of this.lanes.waits) {
      if (wait.end < from || wait.start > to) continue;
      if (!left--) break;
      const middle = this.x((Math.max(wait.start, from) + Math.min(wait.end, to)) / 2);
      const text = duration(wait.ns), wide = c.measureText(text).width;
      const x0 = Math.min(Math.max(0, middle - wide / 2), this.width - wide);
      if (taken.some(([a, b]) => x0 < b + 6 && x0 + wide > a - 6)) continue;
      taken.push([x0, x0 + wide]);
      c.fillStyle = colour;
      c.fillText(text, x0, y + height / 2 - 2);
      c.beginPath();
      c.moveTo(middle - 3, y + height - 4), c.lineTo(middle + 3, y + height - 4), c.lineTo(middle, y + height);
      c.fill();
    }
  }

  /** From the end of a copy to the kernels that waited for it, where there is room to see it. */
  _arrows() {
    const c = this.context, { from, to } = this.state.view;
    const { selected } = this.state;
    const chosen = selected ? this.lanes.lanes[selected.lane].row[selected.i] : null;
    c.strokeStyle = c.fillStyle = this.encoding.colours.wait;
    for (const wait of this.lanes.waits) {
      if (wait.copy < 0 || wait.end < from || wait.end > to) continue;
      const wide = this.x(wait.end) - this.x(wait.start);
      if (wide < 8 && wait.row !== chosen && wait.copy !== chosen) continue;
      const lane = this.lanes.kindAt(wait.copy), x = this.x(wait.end) - 1;
      const top = this.at.compute.y + this.at.compute.height;
      c.lineWidth = 1.5;
      c.beginPath(), c.moveTo(x, this.at[lane].y), c.lineTo(x, top + 4), c.stroke();
      c.beginPath(), c.moveTo(x - 3.5, top + 6), c.lineTo(x + 3.5, top + 6), c.lineTo(x, top), c.fill();
    }
  }

  _host() {
    const c = this.context, { y, height } = this.at.host, { host } = this.lanes;
    const { from, to } = this.state.view;
    const tops = new Float64Array(this.width);
    let most = 0;
    for (const { at, ahead } of host) {
      if (at < from || at > to) continue;
      const x = Math.min(this.width - 1, Math.floor(this.x(at)));
      tops[x] = Math.max(tops[x], ahead), (most = Math.max(most, ahead));
    }
    c.fillStyle = this.theme.soft, c.globalAlpha = 0.5;
    let last = 0;
    for (let x = 0; x < this.width; x++) {
      last = tops[x] || last;
      if (most) c.fillRect(x, y + height - (last / most) * (height - 14), 1, (last / most) * (height - 14));
    }
    c.globalAlpha = 1, c.fillStyle = this.theme.soft;
    c.fillText(most ? `up to ${duration(most)} ahead of the GPU` : "not ahead, or not recorded", 2, y + 6);
  }

  /** The whole length with its waits, and a frame around what is in view. */
  _overview() {
    const c = this.context, { y, height } = this.at.overview, { length, bands, waits } = this.lanes;
    const { header, columns } = this.lanes.recording, { from, to } = this.state.view;
    const x = (t) => (t / length) * this.width;
    c.fillStyle = this.theme.faint;
    c.fillRect(0, y, this.width, height);
    for (let i = 0; i < bands.phase.length; i++) {
      c.globalAlpha = 0.3;
      c.fillStyle = this.encoding.colours[header.phases[columns.phase[bands.phase.row[i]]]] ?? this.theme.soft;
      c.fillRect(x(bands.phase.start[i]), y, x(bands.phase.end[i]) - x(bands.phase.start[i]), height);
    }
    c.globalAlpha = 1, c.fillStyle = this.encoding.colours.wait;
    for (const wait of waits) c.fillRect(x(wait.start), y + 3, Math.max(x(wait.end) - x(wait.start), 1), height - 6);
    if (to - from < length * 0.999) {
      const left = x(Math.max(from, 0)), right = x(Math.min(to, length));
      c.fillStyle = this.theme.ground, c.globalAlpha = 0.6;
      c.fillRect(0, y, left, height), c.fillRect(right, y, this.width - right, height);
      c.globalAlpha = 1, c.strokeStyle = this.theme.ink, c.lineWidth = 1.5;
      c.strokeRect(left, y - 1, Math.max(right - left, 2), height + 2);
    }
  }

  _brush() {
    const c = this.context, { brush } = this.state;
    if (!brush) return;
    const [x0, x1] = brush.map((t) => this.x(t));
    const top = this.at.axis.y, tall = this.at.host.y - top - 4;
    c.fillStyle = this.theme.ink, c.globalAlpha = 0.08;
    c.fillRect(x0, top, x1 - x0, tall);
    c.globalAlpha = 0.7;
    c.fillRect(x0, top, 1, tall), c.fillRect(x1 - 1, top, 1, tall);
    c.globalAlpha = 1;
  }

  _selected() {
    const c = this.context, { selected } = this.state;
    if (!selected) return;
    const pieces = this.lanes.lanes[selected.lane], { y, height } = this.at[selected.lane];
    const x0 = this.x(pieces.start[selected.i]), x1 = this.x(pieces.end[selected.i]);
    const wide = Math.max(x1 - x0, 2);
    // Two rings, so that it stands out from whatever is beside it and hides nothing inside.
    c.strokeStyle = this.theme.ground, c.lineWidth = 1.5;
    c.strokeRect(x0 - 1, y - 1, wide + 2, height + 2);
    c.strokeStyle = this.theme.ink, c.lineWidth = 2;
    c.strokeRect(x0 - 2.5, y - 2.5, wide + 5, height + 5);
  }
}

/** Diagonal lines in the ground's colour. */
function hatching(context, colour, ratio) {
  const side = Math.round(6 * ratio), tile = document.createElement("canvas");
  tile.width = tile.height = side;
  const c = tile.getContext("2d");
  c.strokeStyle = colour, c.globalAlpha = 0.42, c.lineWidth = 1.5 * ratio;
  c.beginPath();
  for (const k of [-1, 0, 1]) c.moveTo(k * side - 2, side + 2), c.lineTo((k + 1) * side + 2, -2);
  c.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

