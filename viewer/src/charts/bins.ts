/** A histogram's bins as they are drawn. */

import type { Histogram } from "../api/answers";
import { float } from "../format";

export interface Bin {
  low: number;
  high: number; // equal to `low` if the bin is one value
  count: number;
}

const MOST_VALUES = 40;

/** The bins of a histogram; if there are few different integers, one bin for each. */
export function binsOf(histogram: Histogram, whole: boolean): Bin[] {
  const edges = histogram.edges.map((edge) => float(edge) ?? 0);
  const bins = histogram.counts.map((count, index) => ({ low: edges[index] ?? 0, high: edges[index + 1] ?? edges[index] ?? 0, count }));
  const first = Math.round(edges[0] ?? 0), last = Math.round(edges.at(-1) ?? 0);
  // A single value has a bin of width one around it.
  if (bins.length === 1 && bins[0]) return [{ ...bins[0], low: (bins[0].low + bins[0].high) / 2, high: (bins[0].low + bins[0].high) / 2 }];
  if (!whole || bins.length < last - first + 1 || last - first >= MOST_VALUES) return bins;
  const values = Array.from({ length: last - first + 1 }, (_, index) => ({ low: first + index, high: first + index, count: 0 }));
  for (const bin of bins) {
    // A bin narrower than 1 has at most one integer: the first one that is not below it.
    const value = values[Math.min(last, Math.ceil(bin.low - 1e-6)) - first];
    if (value) value.count += bin.count;
  }
  return values;
}
