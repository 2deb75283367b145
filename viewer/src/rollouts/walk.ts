/** The next and the previous rollout, in the order of the table from which it was opened, else within its group. */

import type { Row } from "../api/answers";
import { rowsOf } from "./query";

const AROUND = 200; // rows to search around a rollout's earlier place, since rows may have come or gone

interface Walk {
  r: string;
  query: string;
  index: number;
  id: string;
}

let walk: Walk | null = null;

export function openedFrom(r: string, query: string, index: number, id: string): void {
  walk = { r, query, index, id };
}

/** The place where the reader left the table. */
export function leftAt(r: string, query: string): number | null {
  return walk !== null && walk.r === r && walk.query === query ? walk.index : null;
}

export async function neighbor(r: string, row: Row, by: 1 | -1): Promise<Row | null> {
  const from = walk !== null && walk.r === r && walk.id === row.id ? walk : { r, query: new URLSearchParams({ group: row.group, sort: "attempt" }).toString(), index: 0, id: row.id };
  const offset = Math.max(0, from.index - AROUND);
  const { rows } = await rowsOf(r, from.query, offset, 2 * AROUND + 1);
  const here = rows.findIndex((one) => one.id === row.id && one.try === row.try);
  const index = (here < 0 ? from.index - offset : here) + by;
  const found = rows[index] ?? null;
  walk = found ? { ...from, index: offset + index, id: found.id } : from;
  return found;
}
