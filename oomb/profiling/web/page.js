// The parts of the page around the canvas: header, figures, legend, table, help.

import { familyNames, placeOf, tableOf } from "./lanes.js";
import { count, duration, moment, percent, rate, size } from "./words.js";

/** An element with attributes and children; texts are texts, never markup. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function figure(name, title, value, text, note = "", look = "") {
  return make("div", {}, make("dt", {}, title),
    make("dd", { class: look }, make("data", { value: String(value), "data-figure": name }, text)),
    make("dd", {}, note));
}

/** The headline: six figures of what is shown. */
export function headlineOf(lanes) {
  const { length, busy, moved, copying, hidden, waiting, worst } = lanes.figures;
  const what = lanes.step === null ? "recording" : "step";
  const none = hidden === null, late = !none && hidden <= 0; // waits outlast copies that began late
  return make("dl", { class: "figures" },
    figure("length", `${what} time`, length / 1e9, duration(length)),
    figure("busy", "compute busy", busy, percent(busy), `of the ${what}`),
    figure("moved", "bytes moved", moved, none ? "none" : size(moved), none ? "no copies" : `at ${rate(moved, copying)}`),
    figure("hidden", "copying hidden", hidden ?? "", none ? "–" : late ? "none" : percent(hidden),
      none ? "" : late ? "waits outlast the copies" : "behind compute", late ? "wait" : ""),
    figure("waiting", "waiting for copies", waiting / 1e9, waiting ? duration(waiting) : "none",
      waiting ? `${percent(waiting / length)} of the ${what}` : "", waiting ? "wait" : ""),
    figure("worst", "worst wait", worst ? worst.ns / 1e9 : 0, worst ? duration(worst.ns) : "none",
      worst ? placeOf(lanes.recording, worst.row) : "", worst ? "wait" : ""));
}

export function swatch(colour, look = "") {
  return make("span", { class: `swatch ${look}`, style: `background-color: ${colour}; --swatch: ${colour}` });
}

/** Only what this recording shows. */
export function legendOf(lanes, encoding) {
  const names = familyNames(encoding), seen = new Set();
  let hatched = false;
  for (const pieces of Object.values(lanes.lanes)) {
    for (const look of pieces.look) if (look >= 0) seen.add(look >> 1), (hatched ||= Boolean(look & 1));
  }
  const label = (name) => encoding.labels[name] ?? name;
  const { colours } = encoding;
  const items = names
    .filter((name, number) => seen.has(number) && name !== "wait" && name !== "copy")
    .map((name) => [swatch(colours[name] + (name === "other" ? "55" : "")), label(name)]);
  if (hatched) items.push([swatch(colours.other, "hatched"), "hatched: backward"]);
  if (seen.has(names.indexOf("copy"))) items.push([swatch(`${colours.copy}80`), "copy, hidden"]);
  if (lanes.waits.length) {
    items.push([swatch(colours.wait), "copy, waited for"]);
    items.push([swatch(colours.wait, "gap"), "compute waits"]);
  }
  return make("ul", { class: "legend" }, ...items.map((item) => make("li", {}, ...item)));
}

/** A kind of stage in words. What a chunk or a layer does beside its parts has no name. */
export function stageName(kind) {
  if (kind === "chunk" || kind === "layer") return `other compute in ${kind}`;
  return { wait: "waiting for copies", copy_in: "copy, host to GPU", copy_out: "copy, GPU to host" }[kind] ?? kind;
}

/** What happened between two moments, by stage. */
export function tableElement(lanes, encoding, from, to, brushed) {
  const lines = tableOf(lanes, from, to), names = familyNames(encoding);
  const flops = lines.some((line) => line.flops > 0);
  const heads = ["stage", "count", "time", "share", "bytes", "GB/s", ...(flops ? ["TFLOP/s"] : []), "waited for"];
  const row = (line) => make("tr", {},
    make("td", {}, swatch(encoding.colours[names[line.family]], line.backward ? "hatched" : ""),
      stageName(line.kind) + (line.backward ? ", backward" : "")),
    make("td", {}, count(line.rows.size)),
    make("td", {}, duration(line.time)),
    make("td", {}, percent(line.time / (to - from))),
    make("td", {}, line.bytes ? size(Math.round(line.bytes)) : ""),
    make("td", {}, line.bytes ? rate(line.bytes, line.time).replace(/ GB\/s$/, "") : ""),
    ...(flops ? [make("td", {}, line.flops ? (line.flops / line.time / 1e3).toFixed(0) : "")] : []),
    make("td", { class: line.waited ? "wait" : "" }, line.waited ? duration(line.waited) : ""));
  const whole = lanes.step === null ? "The whole recording" : "The whole step";
  const caption = brushed
    ? `Selected: ${duration(to - from)}, from ${moment(from, to - from)} to ${moment(to, to - from)}. Esc selects all.`
    : `${whole}. Drag over the lanes to select a part.`;
  return make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...lines.map(row)));
}

const KEYS = [
  [["W", "S"], "zoom in, out (Ctrl and the wheel too)"], [["A", "D"], "earlier, later (Shift and drag too)"],
  [["←", "→"], "previous, next span of the lane"], [["↑", "↓"], "lane above, below"],
  [["n", "N"], "next, previous worst wait"], [["f"], "fit what is selected"], [["0"], "show all"],
  [["Esc"], "close, let go of the selection, leave"], [["?"], "this help"],
];

export function helpElement() {
  return make("div", { class: "help", hidden: true, role: "dialog", "aria-label": "Keys" },
    make("div", {}, make("h2", {}, "Keys, with the lanes focused"),
      make("dl", {}, ...KEYS.flatMap(([keys, what]) => [
        make("dt", {}, ...keys.flatMap((key) => [make("kbd", {}, key), " "])), make("dd", {}, what)]))));
}
