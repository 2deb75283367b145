/** The longest common subsequence of two sequences, found by Myers' method. */

export type Pair = [number, number]; // places of equal elements in the two sequences

const MOST_EDITS = 1200; // with more, only the common beginning and end are found

/** Places with equal elements, in order. */
export function common<T>(a: readonly T[], b: readonly T[]): Pair[] {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = shortestEdit(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const pairs: Pair[] = [];
  for (let at = 0; at < start; at++) pairs.push([at, at]);
  for (const [i, j] of middle) pairs.push([start + i, start + j]);
  for (let at = end; at > 0; at--) pairs.push([a.length - at, b.length - at]);
  return pairs;
}

function shortestEdit<T>(a: readonly T[], b: readonly T[]): Pair[] {
  const [n, m] = [a.length, b.length];
  if (n === 0 || m === 0) return [];
  const most = Math.min(n + m, MOST_EDITS);
  const reach = new Int32Array(2 * most + 3); // by diagonal: how far this number of edits leads along `a`
  const trace: Int32Array[] = [];
  const middle = most + 1;
  for (let edits = 0; edits <= most; edits++) {
    trace.push(reach.slice(middle - edits - 1, middle + edits + 2));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && (reach[middle + k - 1] ?? 0) < (reach[middle + k + 1] ?? 0));
      let x = down ? (reach[middle + k + 1] ?? 0) : (reach[middle + k - 1] ?? 0) + 1;
      while (x < n && x - k < m && a[x] === b[x - k]) x += 1;
      reach[middle + k] = x;
      if (x >= n && x - k >= m) return walkBack(trace, n, m);
    }
  }
  return [];
}

/** Walk from the end back along the edits, and collect equal elements. */
function walkBack(trace: Int32Array[], n: number, m: number): Pair[] {
  const pairs: Pair[] = [];
  let [x, y] = [n, m];
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const before = trace[edits] as Int32Array; // its middle is at edits + 1
    const at = (k: number) => before[edits + 1 + k] ?? 0;
    const k = x - y;
    const from = k === -edits || (k !== edits && at(k - 1) < at(k + 1)) ? k + 1 : k - 1;
    const [fromX, fromY] = edits === 0 ? [0, 0] : [at(from), at(from) - from];
    while (x > fromX && y > fromY) pairs.push([--x, --y]);
    [x, y] = [fromX, fromY];
  }
  return pairs.reverse();
}
