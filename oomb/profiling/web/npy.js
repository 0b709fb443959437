// Reads a recording, `run.oomb`: a zip of header.json and one events/<column>.npy per column.

const HEADER = "header.json";
const MAX_HEADER_BYTES = 1 << 20;
const NPY_HEADER_BYTES = 4096;
const ARRAYS = {
  "|i1": Int8Array, "|u1": Uint8Array, "|b1": Uint8Array,
  "<i2": Int16Array, "<u2": Uint16Array, "<i4": Int32Array, "<u4": Uint32Array,
  "<f4": Float32Array, "<f8": Float64Array, "<i8": BigInt64Array,
};
/** Moments, which are kept as distances to the first one: 2^53 ns are only 104 days. */
const MOMENTS = ["t_ns", "enqueue_ns"];

/** A file's bytes as {header, columns}: numbers, moments in ns after `t_ns` of the first event. */
export async function readRecording(bytes) {
  const members = zipMembers(bytes);
  const part = members.get(HEADER);
  if (!part || part.size > MAX_HEADER_BYTES) throw new Error("this is no oomb recording");
  const header = JSON.parse(new TextDecoder().decode(await inflated(bytes, part)));
  const columns = {};
  for (const [name, member] of members) {
    const column = name.match(/^events\/(\w+)\.npy$/)?.[1];
    if (!column) continue;
    if (member.size > header.events * 8 + NPY_HEADER_BYTES) {
      throw new Error(`column ${column} is larger than its ${header.events} events`);
    }
    columns[column] = npyArray(await inflated(bytes, member));
  }
  return fromArrays(header, columns);
}

/** The same from arrays handed over: a typed array per column, int64 as BigInt64Array. */
export function fromArrays(header, columns) {
  const base = columns.t_ns?.length ? columns.t_ns[0] : 0n;
  const numbers = {};
  for (const [name, values] of Object.entries(columns)) {
    if (values.length !== header.events) {
      throw new Error(`column ${name} has ${values.length} rows, not ${header.events}`);
    }
    const wide = values instanceof BigInt64Array;
    numbers[name] = wide ? narrowed(values, MOMENTS.includes(name) ? BigInt(base) : 0n) : values;
  }
  return { header, columns: numbers };
}

/** int64 as doubles after `base`; a moment that is missing is NaN. */
export function narrowed(values, base) {
  const words = new DataView(values.buffer, values.byteOffset, values.byteLength);
  const high0 = Number(base >> 32n), low0 = Number(base & 0xffffffffn);
  const result = new Float64Array(values.length);
  for (let i = 0; i < result.length; i++) {
    const low = words.getUint32(8 * i, true), high = words.getInt32(8 * i + 4, true);
    const missing = base !== 0n && high === -1 && low === 0xffffffff;
    result[i] = missing ? NaN : (high - high0) * 2 ** 32 + (low - low0);
  }
  return result;
}

/** name -> {method, size, packed, at} of every member, from the zip's central directory. */
export function zipMembers(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22; // the directory's end has a comment of up to 64 KiB behind it
  while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end--;
  if (end < 0) throw new Error("this is no oomb recording");
  const members = new Map();
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left--) {
    if (view.getUint32(at, true) !== 0x02014b50) throw new Error("the recording is damaged");
    const [name, extra, comment] = [28, 30, 32].map((k) => view.getUint16(at + k, true));
    members.set(new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + name)), {
      method: view.getUint16(at + 10, true),
      packed: view.getUint32(at + 20, true),
      size: view.getUint32(at + 24, true),
      at: view.getUint32(at + 42, true),
    });
    at += 46 + name + extra + comment;
  }
  return members;
}

async function inflated(bytes, { method, packed, size, at }) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const start = at + 30 + view.getUint16(at + 26, true) + view.getUint16(at + 28, true);
  const body = bytes.subarray(start, start + packed);
  if (method === 0) return body.slice();
  if (method !== 8) throw new Error("the recording is packed in a way this page cannot read");
  const stream = new Blob([body]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const result = new Uint8Array(size);
  let length = 0;
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (length + value.length > size) throw new Error("the recording is damaged");
    result.set(value, length);
    length += value.length;
  }
  if (length !== size) throw new Error("the recording is damaged");
  return result;
}

/** A .npy file's bytes as a typed array; one dimension, little-endian. */
export function npyArray(bytes) {
  const long = bytes[6] > 1; // version 2 has a longer length
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const start = long ? 12 : 10;
  const size = long ? view.getUint32(8, true) : view.getUint16(8, true);
  const text = new TextDecoder("latin1").decode(bytes.subarray(start, start + size));
  const dtype = text.match(/'descr': '([^']*)'/)?.[1];
  const rows = Number(text.match(/'shape': \((\d+),\)/)?.[1]);
  const make = ARRAYS[dtype];
  if (!make || !Number.isInteger(rows)) throw new Error(`the recording has a column of ${text}`);
  const body = bytes.slice(start + size);
  if (body.length !== rows * make.BYTES_PER_ELEMENT) throw new Error("the recording is damaged");
  return new make(body.buffer);
}
