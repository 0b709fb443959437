// From a recording's columns to what is drawn: pieces of time in lanes, waits, and a few figures.

const NONE = -1;
const COPIES = ["copy_in", "copy_out"];
const CONTAINERS = ["phase", "chunk", "layer"];

/** Pieces of one lane in order of time; they do not overlap. */
export class Pieces {
  constructor() {
    this.start = [], this.end = [], this.row = [], this.look = [];
  }

  add(start, end, row, look) {
    this.start.push(start), this.end.push(end), this.row.push(row), this.look.push(look);
  }

  get length() {
    return this.start.length;
  }

  /** Number of the first piece that ends after `t`. */
  after(t) {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] > t) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Number of the piece at `t`, or -1. */
  at(t) {
    const found = this.after(t);
    return found < this.length && this.start[found] <= t ? found : -1;
  }
}

/** The steps that the recording holds, in order; events outside of any are left out. */
export function stepsOf({ columns: { step } }) {
  return [...new Set(step)].filter((number) => number !== NONE).sort((a, b) => a - b);
}

/** What one step, or with null the whole recording, looks like. */
export function readLanes(recording, encoding, step = null) {
  const { header, columns } = recording;
  const rows = rowsOf(columns, step);
  const kindAt = (row) => header.kinds[columns.kind[row]];
  const looks = makeLooks(header, columns, encoding);
  const kindRows = (...kinds) => rows.filter((row) => kinds.includes(kindAt(row)));
  const begin = rows.reduce((least, row) => Math.min(least, columns.t_ns[row]), Infinity);
  const end = rows.reduce((most, row) => Math.max(most, endOf(columns, row)), -Infinity);
  const origin = rows.length ? begin : 0;

  const bands = Object.fromEntries(
    CONTAINERS.map((kind) => [kind, containers(columns, kindRows(kind), origin)]),
  );
  const compute = new Pieces();
  const elsewhere = [...COPIES, "phase"];
  const onCompute = rows.filter((row) => columns.dur_ns[row] > 0 && !elsewhere.includes(kindAt(row)));
  innermost(columns, onCompute, (row, start, stop) => {
    compute.add(start - origin, stop - origin, row, looks(row));
  });
  const waits = findWaits(recording, rows, origin);
  const lanes = { compute };
  for (const kind of COPIES) lanes[kind] = copyPieces(columns, kindRows(kind), waits, origin, looks);
  return {
    recording, step, rows, origin, bands, lanes, waits,
    length: rows.length ? end - begin : 1,
    host: hostAhead(columns, onCompute, origin),
    figures: figuresOf(recording, rows, compute, waits, rows.length ? end - begin : 0, kindAt),
    kindAt,
    familyOf: (row) => looks(row) >> 1,
  };
}

/** family * 2 + (1 if backward): what a piece looks like. The last two families are not stages. */
function makeLooks(header, columns, encoding) {
  const families = Object.keys(encoding.families);
  const family = header.kinds.map((kind) => {
    if (kind === "wait") return families.length + 1;
    const found = families.findIndex((name) => encoding.families[name].includes(kind));
    return found < 0 ? families.length : found;
  });
  return (row) => 2 * family[columns.kind[row]] + (columns.backward[row] ? 1 : 0);
}

/** The families in the order of their numbers. */
export function familyNames(encoding) {
  return [...Object.keys(encoding.families), "other", "wait"];
}

function rowsOf(columns, step) {
  const rows = [];
  for (let row = 0; row < columns.t_ns.length; row++) {
    if (step === null || columns.step[row] === step) rows.push(row);
  }
  // Of spans that start together the longer one holds the other; of equal ones, the earlier begun.
  const { t_ns: t, dur_ns: long, number } = columns;
  return rows.sort((a, b) => t[a] - t[b] || long[b] - long[a] || (number ? number[a] - number[b] : 0));
}

function endOf(columns, row) {
  return columns.t_ns[row] + columns.dur_ns[row];
}

function containers(columns, rows, origin) {
  const pieces = new Pieces();
  for (const row of rows) {
    const before = pieces.length ? pieces.end[pieces.length - 1] : -Infinity;
    const start = Math.max(columns.t_ns[row] - origin, before);
    const end = endOf(columns, row) - origin;
    if (end > start) pieces.add(start, end, row, 0);
  }
  return pieces;
}

/** Calls `take(row, start, end)` for what runs at each moment of a stream, the innermost span. */
export function innermost(columns, rows, take) {
  const open = []; // {row, end}, outermost first
  let at = -Infinity;
  const closeUntil = (t) => {
    while (open.length && open[open.length - 1].end <= t) {
      const { row, end } = open.pop();
      if (end > at) take(row, at, end), (at = end);
    }
  };
  for (const row of rows) {
    const start = columns.t_ns[row];
    closeUntil(start);
    const parent = open[open.length - 1];
    if (parent && start > at) take(parent.row, at, start);
    at = start;
    open.push({ row, end: Math.min(endOf(columns, row), parent ? parent.end : Infinity) });
  }
  closeUntil(Infinity);
}

/** A copy is hidden but for the time in which kernels waited for it: two pieces. */
function copyPieces(columns, rows, waits, origin, looks) {
  const exposed = new Map();
  for (const wait of waits) {
    exposed.set(wait.copy, Math.min(exposed.get(wait.copy) ?? Infinity, wait.start));
  }
  const pieces = new Pieces();
  for (const row of rows) {
    const before = pieces.length ? pieces.end[pieces.length - 1] : -Infinity;
    const start = Math.max(columns.t_ns[row] - origin, before);
    const end = endOf(columns, row) - origin;
    const from = Math.max(start, exposed.get(row) ?? end);
    if (from > start) pieces.add(start, Math.min(from, end), row, looks(row));
    if (end > from) pieces.add(from, end, row, RED);
  }
  return pieces;
}

/** The look of a piece of a copy for which kernels waited. */
export const RED = -1;

const SLACK_NS = 50_000; // a copy may begin so long after it could have

/** Waits that took time, the longest first: {row, start, end, ns, copy, cause}. */
function findWaits({ header, columns }, rows, origin) {
  const wait = header.kinds.indexOf("wait");
  const found = rows.filter((row) => columns.kind[row] === wait && columns.dur_ns[row] > 0);
  if (!found.length) return [];
  const copies = new Map(); // step -> number -> row, as numbers are those of a step
  const { linkFree, usual } = links(header, columns, rows);
  for (const row of linkFree.keys()) {
    const step = columns.step[row];
    if (!copies.has(step)) copies.set(step, new Map());
    copies.get(step).set(columns.number?.[row], row);
  }
  return found.map((row) => {
    const copy = copies.get(columns.step[row])?.get(columns.waits_on?.[row]) ?? NONE;
    const start = columns.t_ns[row] - origin, ns = columns.dur_ns[row];
    const cause = copy === NONE ? "unknown" : causeOf(columns, copy, ns, linkFree, usual);
    return { row, start, end: start + ns, ns, copy, cause };
  }).sort((a, b) => b.ns - a.ns);
}

/** When the link was free for each copy, and how long it should have taken, by the median rate. */
function links(header, columns, rows) {
  const linkFree = new Map(), usual = new Map();
  for (const kind of COPIES) {
    const wanted = header.kinds.indexOf(kind);
    const own = rows.filter((row) => columns.kind[row] === wanted);
    let free = -Infinity;
    for (const row of own) linkFree.set(row, free), (free = Math.max(free, endOf(columns, row)));
    const sized = own.filter((row) => columns.nbytes?.[row] > 0 && columns.dur_ns[row] > 0);
    const perByte = Float64Array.from(sized, (row) => columns.dur_ns[row] / columns.nbytes[row]).sort();
    const half = perByte.length >> 1;
    const median = perByte.length % 2 ? perByte[half] : (perByte[half - 1] + perByte[half]) / 2;
    if (perByte.length) for (const row of own) usual.set(row, columns.nbytes[row] * median);
  }
  return { linkFree, usual };
}

/** What held the copy up that kernels waited for: whatever was ready last. */
function causeOf(columns, copy, waited, linkFree, usual) {
  const free = linkFree.get(copy), launched = columns.enqueue_ns?.[copy] ?? NaN;
  if (usual.get(copy) && columns.dur_ns[copy] - usual.get(copy) > waited / 2) return "slow copy";
  const ready = Math.max(free, Number.isNaN(launched) ? -Infinity : launched);
  if (columns.t_ns[copy] - ready <= SLACK_NS) return ready === free ? "link busy" : "issued late";
  return Number.isNaN(launched) ? "unknown" : "slot busy";
}

export const CAUSES = {
  "issued late": "the host launched the copy too late",
  "slot busy": "its slot was still in use: the ring is too shallow",
  "link busy": "the copies before it had not ended: the bus is too slow",
  "slow copy": "the copy itself ran far slower than the others",
  unknown: "the recording does not say when the host launched it",
};

/** How far the host was ahead of the GPU, at the start of each stage. */
function hostAhead(columns, rows, origin) {
  const points = [];
  for (const row of rows) {
    const ahead = columns.t_ns[row] - (columns.enqueue_ns?.[row] ?? NaN);
    if (!Number.isNaN(ahead)) points.push({ at: columns.t_ns[row] - origin, ahead: Math.max(0, ahead) });
  }
  return points;
}

/** The headline's figures, in nanoseconds and bytes. */
function figuresOf({ columns }, rows, compute, waits, length, kindAt) {
  let copying = 0, moved = 0, busy = 0;
  for (const row of rows) {
    if (!COPIES.includes(kindAt(row))) continue;
    copying += columns.dur_ns[row];
    moved += Math.max(0, columns.nbytes?.[row] ?? 0);
  }
  for (let i = 0; i < compute.length; i++) {
    if (kindAt(compute.row[i]) !== "wait") busy += compute.end[i] - compute.start[i];
  }
  const waiting = waits.reduce((sum, wait) => sum + wait.ns, 0);
  return {
    length, moved, copying, waiting,
    busy: length ? busy / length : 0,
    hidden: copying ? 1 - waiting / copying : null,
    worst: waits[0] ?? null,
  };
}

/** Where an event belongs: "sweep, chunk 3, layer 2". */
export function placeOf({ header, columns }, row) {
  const parts = [];
  if (columns.phase[row] !== NONE) parts.push(header.phases[columns.phase[row]]);
  if (columns.chunk[row] !== NONE) parts.push(`chunk ${columns.chunk[row]}`);
  if (columns.layer[row] !== NONE) parts.push(`layer ${columns.layer[row]}`);
  return parts.join(", ") || "outside of a step";
}

/** Rows of the table for [from, to]: time by stage and direction, each moment counted once. */
export function tableOf(lanes, from, to) {
  const { columns } = lanes.recording;
  const found = new Map();
  const take = (row, start, end) => {
    const time = Math.min(end, to) - Math.max(start, from);
    if (time <= 0) return;
    const backward = Boolean(columns.backward[row]);
    const kind = lanes.kindAt(row);
    const key = `${kind}/${backward}`;
    if (!found.has(key)) {
      const family = lanes.familyOf(row);
      found.set(key, { kind, backward, family, rows: new Set(), time: 0, bytes: 0, flops: 0, waited: 0 });
    }
    const line = found.get(key);
    const share = time / Math.max(columns.dur_ns[row], 1);
    line.time += time;
    line.rows.add(row);
    if (columns.nbytes?.[row] > 0) line.bytes += columns.nbytes[row] * share;
    if (columns.flops?.[row] > 0) line.flops += columns.flops[row] * share;
    return line;
  };
  for (const pieces of Object.values(lanes.lanes)) {
    for (let i = pieces.after(from); i < pieces.length && pieces.start[i] < to; i++) {
      const line = take(pieces.row[i], pieces.start[i], pieces.end[i]);
      if (line && pieces.look[i] === RED) {
        line.waited += Math.min(pieces.end[i], to) - Math.max(pieces.start[i], from);
      }
    }
  }
  return [...found.values()].sort((a, b) => b.time - a.time);
}
