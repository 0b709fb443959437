// Numbers as people read them.

function digits(x) {
  return x >= 99.95 ? x.toFixed(0) : x >= 9.995 ? x.toFixed(1) : x.toFixed(2);
}

/** Nanoseconds as 12.3 ms, 4.12 s or 850 ns. */
export function duration(ns) {
  if (ns >= 9.995e8 * 60) return `${Math.floor(ns / 6e10)} min ${digits((ns % 6e10) / 1e9)} s`;
  if (ns >= 9.995e8) return `${digits(ns / 1e9)} s`;
  if (ns >= 9.995e5) return `${digits(ns / 1e6)} ms`;
  if (ns >= 999.5) return `${digits(ns / 1e3)} µs`;
  return `${Math.round(ns)} ns`;
}

/** A moment, exact enough to find its place in a range of `span` nanoseconds: 1.1053 s. */
export function moment(ns, span) {
  const [unit, one] = ns >= 1e9 ? ["s", 1e9] : ns >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
  const places = Math.ceil(-Math.log10(Math.max(span, 1) / one / 100));
  return `${(ns / one).toFixed(Math.min(Math.max(places, 0), 9))} ${unit}`;
}

/** Bytes as 1.50 MB, in steps of 1,000. */
export function size(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < 4) (bytes /= 1000), unit++;
  return `${unit ? digits(bytes) : bytes} ${units[unit]}`;
}

/** A share of 1 in per cent; what is not quite all is not called 100 %. */
export function percent(share) {
  if (share > 0.9995 && share < 1) return "> 99.9 %";
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${share === 1 ? "100" : (100 * share).toFixed(1)} %`;
}

/** Bytes a second, from bytes and nanoseconds. */
export function rate(bytes, ns) {
  const perSecond = ns > 0 ? (bytes * 1e9) / ns : 0;
  return perSecond >= 1e7 ? `${digits(perSecond / 1e9)} GB/s` : `${size(Math.round(perSecond))}/s`;
}

/** 1234567 as 1,234,567. */
export function count(n) {
  return Math.round(n).toLocaleString("en-US");
}

/** Moments in [from, to] for about `wanted` ticks, and how to write them. */
export function ticks(from, to, wanted) {
  const least = Math.max((to - from) / Math.max(wanted, 1), 1);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= least * 0.999);
  const unit = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]].find(([, ns]) => to >= ns) ?? ["ns", 1];
  const places = Math.max(0, -Math.floor(Math.log10(step / unit[1]) + 1e-9));
  const marks = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to; k++) {
    marks.push({ at: k * step, text: `${((k * step) / unit[1]).toFixed(places)} ${unit[0]}` });
  }
  return marks;
}
