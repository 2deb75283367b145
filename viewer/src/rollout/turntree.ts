/** The drawn tree of turns: one row per turn in the order of time, branches in columns. */

import type { Fork, Session, Turn } from "../api/answers";

// After forks with these causes the same conversation continues; a retry or an edit opens another beside it.
const GOES_ON = new Set(["thinking_stripped", "reply_whitespace", "reply_rewritten", "retokenized", "compaction"]);

export interface TreeRow {
  turn: Turn;
  fork: Fork | null;
  column: number;
  row: number;
  from: TreeRow | null; // the turn from which its line is drawn
  before: TreeRow | null; // the previous turn for a reader
}

export interface DrawnTree {
  rows: TreeRow[];
  width: number; // in columns
  byTurn: Map<string, TreeRow>;
}

export function drawTree(session: Session): DrawnTree {
  const forks = new Map(session.forks.map((fork) => [fork.turn, fork]));
  const byTurn = new Map<string, TreeRow>();
  const rows: TreeRow[] = [];
  for (const turn of session.turns) {
    const fork = forks.get(turn.id) ?? null;
    const parent = byTurn.get(turn.parent ?? "") ?? null;
    const departed = byTurn.get(fork?.parent ?? "") ?? null;
    const goesOn = fork !== null && GOES_ON.has(fork.cause);
    const from = goesOn ? (departed ?? parent) : (parent ?? departed);
    const before = goesOn ? (departed ?? parent) : parent;
    const row: TreeRow = { turn, fork, column: 0, row: rows.length, from, before };
    rows.push(row);
    byTurn.set(turn.id, row);
  }
  return { rows, byTurn, width: placeColumns(rows) };
}

/** The turn that continues in each turn's own column: the one that leads furthest, never a conversation beside it. */
function heirs(rows: TreeRow[]): Map<TreeRow, TreeRow> {
  const reach = new Map<TreeRow, number>();
  const heir = new Map<TreeRow, TreeRow>();
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

/** Assign each row the leftmost free column. Return the number of columns. */
function placeColumns(rows: TreeRow[]): number {
  const heir = heirs(rows);
  const last = new Map<TreeRow, number>(); // the last row of the column that starts here
  for (const row of [...rows].reverse()) {
    const next = heir.get(row);
    last.set(row, next ? (last.get(next) ?? next.row) : row.row);
  }
  const busyUntil: number[] = [];
  for (const row of rows) {
    if (row.from && heir.get(row.from) === row) {
      row.column = row.from.column;
      continue;
    }
    // The column has the line from its parent to its own row, then its own turns.
    const starts = row.from ? row.from.row : row.row;
    let column = row.from ? row.from.column + 1 : 0;
    while ((busyUntil[column] ?? -1) >= starts) column += 1;
    for (let index = busyUntil.length; index < column; index++) busyUntil.push(-1);
    busyUntil[column] = last.get(row) ?? row.row;
    row.column = column;
  }
  return Math.max(1, busyUntil.length);
}

/** The rows of a branch for a reader, from the first to this one. */
export function pathTo(row: TreeRow | null): TreeRow[] {
  const path: TreeRow[] = [];
  for (let at = row; at !== null; at = at.before) path.push(at);
  return path.reverse();
}

/** The last turn of a turn's branch; of several the one that leads furthest. */
export function leafFor(tree: DrawnTree, turn: string): TreeRow | null {
  const start = tree.byTurn.get(turn);
  if (!start) return null;
  const heir = heirs(tree.rows);
  let leaf = start;
  for (let next = heir.get(leaf); next !== undefined; next = heir.get(leaf)) leaf = next;
  return leaf;
}

/** Whether a branch is a sub-agent's beside another, and not its continuation or its replacement. */
export function besideOf(one: TreeRow, other: TreeRow): boolean {
  const read = new Set(pathTo(one));
  return pathTo(other).find((row) => !read.has(row))?.fork?.cause === "sub_agent";
}

/** The turn that an address names: by its id, its number in the first session with that number, or the end of its id. */
export function turnNamed(trees: DrawnTree[], name: string): string | null {
  if (trees.some((tree) => tree.byTurn.has(name))) return name;
  const rows = trees.flatMap((tree) => tree.rows);
  if (/^\d+$/.test(name)) return rows.find((row) => row.turn.sequence === Number(name))?.turn.id ?? null;
  const ending = rows.filter((row) => row.turn.id.endsWith(name) || row.turn.id.startsWith(name));
  return ending.length === 1 ? (ending[0]?.turn.id ?? null) : null;
}
