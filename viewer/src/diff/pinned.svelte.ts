/** The rollout that a reader has chosen for a comparison; it is stored while the tab is open. */

import { isStatic } from "../api/embedded";
import type { Row } from "../api/answers";
import { go, namedTry, paths, type RolloutPlace } from "../route.svelte";

export interface Pinned extends RolloutPlace {
  name: string;
  task: string | null;
  source: string | null;
}

const KEY = "rolltape-compare-with";

function remembered(): Pinned | null {
  if (isStatic) return null;
  try {
    return JSON.parse(sessionStorage.getItem(KEY) ?? "null") as Pinned | null;
  } catch {
    return null; // storage is off, or has something else
  }
}

const state = $state<{ pinned: Pinned | null }>({ pinned: remembered() });

export function pinned(): Pinned | null {
  return state.pinned;
}

export function pin(one: Pinned | null): void {
  state.pinned = one;
  try {
    if (one === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, JSON.stringify(one));
  } catch {
    // Without storage it is kept until the page is reloaded.
  }
}

export function isPinned(r: string, row: Row): boolean {
  return state.pinned?.r === r && state.pinned.id === row.id && state.pinned.try === namedTry(row);
}

export function pinRow(r: string, row: Row): void {
  pin({ r, id: row.id, try: namedTry(row), name: `${row.task ?? row.short}, attempt ${row.attempt}`, task: row.task, source: row.source });
}

/** Store the first rollout; compare the second one with it. */
export function compareWith(r: string, row: Row): void {
  const first = state.pinned;
  if (first === null) pinRow(r, row);
  else if (isPinned(r, row)) pin(null);
  else {
    pin(null);
    go(paths.diff(first, { r, id: row.id, try: namedTry(row) }));
  }
}
