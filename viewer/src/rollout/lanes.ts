/** The tree of turns as lanes: one row a turn, in the order in which they happened. */

import type { Fork, Session, Turn } from "../api/answers";

// After these the same conversation goes on; a retry or an edit opens another beside it.
const GOES_ON = new Set(["thinking_stripped", "reply_whitespace", "reply_rewritten", "retokenized", "compaction"]);

export interface LaneRow {
  turn: Turn;
  fork: Fork | null;
  lane: number;
  row: number;
  from: LaneRow | null; // the turn that it is drawn from
  before: LaneRow | null; // the turn that a reader has read before it
}

export interface Lanes {
  rows: LaneRow[];
  width: number; // lanes
  byTurn: Map<string, LaneRow>;
}

export function lanesOf(session: Session): Lanes {
  const forks = new Map(session.forks.map((fork) => [fork.turn, fork]));
  const byTurn = new Map<string, LaneRow>();
  const rows: LaneRow[] = [];
  for (const turn of session.turns) {
    const fork = forks.get(turn.id) ?? null;
    const parent = byTurn.get(turn.parent ?? "") ?? null;
    const departed = byTurn.get(fork?.parent ?? "") ?? null;
    const goesOn = fork !== null && GOES_ON.has(fork.cause);
    const from = goesOn ? (departed ?? parent) : (parent ?? departed);
    const before = goesOn ? (departed ?? parent) : parent;
    const row: LaneRow = { turn, fork, lane: 0, row: rows.length, from, before };
    rows.push(row);
    byTurn.set(turn.id, row);
  }
  return { rows, byTurn, width: placeLanes(rows) };
}

/** Which turn goes on in each turn's own lane: the one that leads furthest; never a conversation beside it. */
function heirs(rows: LaneRow[]): Map<LaneRow, LaneRow> {
  const reach = new Map<LaneRow, number>();
  const heir = new Map<LaneRow, LaneRow>();
  for (const row of [...rows].reverse()) {
    const far = reach.get(row) ?? row.row;
    if (!row.before) continue;
    if (far > (reach.get(row.before) ?? -1)) {
      reach.set(row.before, far);
      heir.set(row.before, row);
    }
  }
  return heir;
}

/** Give each row the leftmost lane that nobody passes through; returns how many lanes there are. */
function placeLanes(rows: LaneRow[]): number {
  const heir = heirs(rows);
  const last = new Map<LaneRow, number>(); // the row at which the lane that starts here ends
  for (const row of [...rows].reverse()) {
    const next = heir.get(row);
    last.set(row, next ? (last.get(next) ?? next.row) : row.row);
  }
  const busyUntil: number[] = [];
  for (const row of rows) {
    if (row.from && heir.get(row.from) === row) {
      row.lane = row.from.lane;
      continue;
    }
    // From its parent down to its own row the lane carries the line, and then its own turns.
    const starts = row.from ? row.from.row : row.row;
    let lane = row.from ? row.from.lane + 1 : 0;
    while ((busyUntil[lane] ?? -1) >= starts) lane += 1;
    for (let index = busyUntil.length; index < lane; index++) busyUntil.push(-1);
    busyUntil[lane] = last.get(row) ?? row.row;
    row.lane = lane;
  }
  return Math.max(1, busyUntil.length);
}

/** The rows that a reader of this one's branch has read, from the first to this one. */
export function pathTo(row: LaneRow | null): LaneRow[] {
  const path: LaneRow[] = [];
  for (let at = row; at !== null; at = at.before) path.push(at);
  return path.reverse();
}

/** The last turn of the branch on which a turn lies: of several the one that leads furthest. */
export function leafFor(lanes: Lanes, turn: string): LaneRow | null {
  const start = lanes.byTurn.get(turn);
  if (!start) return null;
  const heir = heirs(lanes.rows);
  let leaf = start;
  for (let next = heir.get(leaf); next !== undefined; next = heir.get(leaf)) leaf = next;
  return leaf;
}

/** Whether a branch is a sub-agent's beside another, rather than what comes after it or instead of it. */
export function besideOf(one: LaneRow, other: LaneRow): boolean {
  const read = new Set(pathTo(one));
  return pathTo(other).find((row) => !read.has(row))?.fork?.cause === "sub_agent";
}
