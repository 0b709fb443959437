// Where spans are narrower than a pixel, a column shows the share of its time that each look takes.

const WIDE_PX = 4; // a piece this wide is drawn by itself even where the lane is thinned
const DENSE = 0.5; // pieces for each pixel in view, from which the whole lane is thinned

/**
 * Cuts a lane into what can be drawn: pieces by themselves, and columns of shares.
 *
 * @param {Pieces} pieces of a lane
 * @param {{from: number, to: number, width: number}} view nanoseconds, and pixels
 * @returns {{wide: number[], thin: Uint8Array, shares: Map<number, Float64Array>,
 *   spans: Uint32Array, perColumn: number}} numbers of the pieces; whether each column is thinned;
 *   look -> share of each of those; pieces that touch each column; of a thinned one on average
 */
export function thinned(pieces, { from, to, width }) {
  const perPixel = (to - from) / width;
  const first = pieces.after(from);
  const spans = new Uint32Array(width), narrow = new Uint8Array(width);
  let last = first;
  for (; last < pieces.length && pieces.start[last] < to; last++) {
    const [x0, x1] = reach(pieces, last, from, perPixel, width);
    const isNarrow = pieces.end[last] - pieces.start[last] < perPixel;
    for (let x = x0; x <= x1; x++) spans[x]++, (narrow[x] |= isNarrow);
  }
  const dense = last - first > DENSE * width;
  const thin = new Uint8Array(width), wide = [], shares = new Map();
  let columns = 0, touched = 0;
  for (let x = 0; x < width; x++) {
    thin[x] = spans[x] && (dense || (narrow[x] && spans[x] > 3));
    if (thin[x]) columns++, (touched += spans[x]);
  }
  for (let i = first; i < last; i++) {
    const start = pieces.start[i], end = pieces.end[i];
    const [x0, x1] = reach(pieces, i, from, perPixel, width);
    let alone = end - start >= WIDE_PX * perPixel;
    let own = shares.get(pieces.look[i]);
    if (!own) shares.set(pieces.look[i], (own = new Float64Array(width)));
    for (let x = x0; x <= x1; x++) {
      if (!thin[x]) {
        alone = true;
        continue;
      }
      const left = from + x * perPixel;
      own[x] += Math.max(Math.min(end, left + perPixel) - Math.max(start, left), 0) / perPixel;
    }
    if (alone) wide.push(i);
  }
  return { wide, thin, shares, spans, perColumn: columns ? touched / columns : 0 };
}

/** The first and last column that a piece touches. */
function reach(pieces, i, from, perPixel, width) {
  const x0 = Math.max(0, Math.floor((pieces.start[i] - from) / perPixel));
  const x1 = Math.min(width - 1, Math.max(x0, Math.ceil((pieces.end[i] - from) / perPixel) - 1));
  return [Math.min(x0, width - 1), x1];
}
