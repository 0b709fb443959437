// What is shown, in sentences: read aloud, and read by who does not read pictures.

import { CAUSES, placeOf } from "./lanes.js";
import { duration, moment, percent, size } from "./words.js";

const WAYS = { copy_in: "host to GPU", copy_out: "GPU to host" };

/** A whole step: how long, how busy, and what waited longest. */
export function summary(lanes) {
  if (!lanes.rows.length) return "This recording has no events.";
  const { length, busy, waiting, worst, hidden } = lanes.figures;
  const what = lanes.step === null ? "The whole recording" : `Step ${lanes.step}`;
  const took = `${what} took ${duration(length)}; compute was busy ${percent(busy)} of it.`;
  if (hidden === null) return `${took} Nothing was copied.`;
  if (!worst) return `${took} No kernel waited for a copy.`;
  return `${took} Kernels waited ${duration(waiting)} for copies. The worst wait: ${waitWords(lanes, worst)}`;
}

/** One event. */
export function description(lanes, row) {
  const { waits, recording: { columns } } = lanes;
  const at = waits.findIndex((wait) => wait.row === row);
  if (at >= 0) return `Wait ${at + 1} of ${waits.length}: ${waitWords(lanes, waits[at])}`;
  const kind = lanes.kindAt(row), isCopy = kind in WAYS;
  const name = isCopy ? copyWords(lanes, row) : kind;
  const back = columns.backward[row] ? ", backward" : "";
  const took = duration(columns.dur_ns[row]);
  const start = moment(columns.t_ns[row] - lanes.origin, columns.dur_ns[row]);
  const said = `${name[0].toUpperCase()}${name.slice(1)}${back}, ${placeOf(lanes.recording, row)}: ${took}, from ${start}.`;
  if (!isCopy) return said;
  const waited = waits.reduce((sum, wait) => sum + (wait.copy === row ? wait.ns : 0), 0);
  return `${said} ${waited ? `Kernels waited ${duration(waited)} for it.` : "No kernel waited for it."}`;
}

/** Why a wait was. */
export function causeWords({ cause }) {
  return `${CAUSES[cause]} (${cause})`;
}

function waitWords(lanes, wait) {
  const copy = wait.copy < 0 ? "" : ` for a ${copyWords(lanes, wait.copy)}; ${causeWords(wait)}`;
  return `${duration(wait.ns)} in ${placeOf(lanes.recording, wait.row)}${copy}.`;
}

function copyWords(lanes, row) {
  const bytes = lanes.recording.columns.nbytes?.[row] ?? -1;
  return `copy from ${WAYS[lanes.kindAt(row)]}${bytes > 0 ? ` of ${size(bytes)}` : ""}`;
}
