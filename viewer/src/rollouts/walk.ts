/** From one rollout to the next, in the order of the table that it was opened from, else within its group. */

import type { Row } from "../api/answers";
import { rowsOf } from "./query";

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

/** Where the table was left, to come back to. */
export function leftAt(r: string, query: string): number | null {
  return walk !== null && walk.r === r && walk.query === query ? walk.index : null;
}

export async function neighbour(r: string, row: Row, by: 1 | -1): Promise<Row | null> {
  if (walk === null || walk.r !== r || walk.id !== row.id) {
    const query = new URLSearchParams({ group: row.group, sort: "attempt" }).toString();
    const siblings = await rowsOf(r, query, 0, 500);
    walk = { r, query, index: siblings.rows.findIndex((one) => one.id === row.id && one.try === row.try), id: row.id };
  }
  const index = walk.index + by;
  if (index < 0) return null;
  const found = (await rowsOf(r, walk.query, index, 1)).rows[0] ?? null;
  if (found) walk = { ...walk, index, id: found.id };
  return found;
}
