/** The line that a search found in each row, loaded when rows come into view. */

import type { FoundLine, Row } from "../api/answers";
import { json } from "../api/client";
import { paths, tryQuery } from "../route.svelte";

const AT_ONCE = 40; // rollouts in a request
const WAITS_MS = 60;

const nameOf = (row: Row) => `${row.id}.${row.try}`;
const keyOf = (row: Row) => `${nameOf(row)} ${row.turns}`; // a running rollout may get more lines

export class FoundLines {
  #lines = $state.raw(new Map<string, FoundLine | null>());
  #wanted = new Map<string, Row>();
  #timer: ReturnType<typeof setTimeout> | null = null;

  constructor(
    readonly r: string,
    readonly words: string,
  ) {}

  of(row: Row | null): FoundLine | null {
    return row ? (this.#lines.get(keyOf(row)) ?? null) : null;
  }

  want(row: Row | null): void {
    if (!row || this.#lines.has(keyOf(row)) || this.#wanted.has(keyOf(row))) return;
    this.#wanted.set(keyOf(row), row);
    this.#timer ??= setTimeout(() => void this.#ask(), WAITS_MS);
  }

  async #ask(): Promise<void> {
    const rows = [...this.#wanted.values()].slice(0, AT_ONCE);
    const query = new URLSearchParams({ q: this.words, rollouts: rows.map(nameOf).join(",") });
    try {
      const { lines } = await json<{ lines: Record<string, FoundLine | null> }>(`/api/${encodeURIComponent(this.r)}/lines?${query}`);
      this.#lines = new Map([...this.#lines, ...rows.map((row): [string, FoundLine | null] => [keyOf(row), lines[nameOf(row)] ?? null])]);
    } catch {
      this.#lines = new Map([...this.#lines, ...rows.map((row): [string, null] => [keyOf(row), null])]); // the table reports the error
    }
    for (const row of rows) this.#wanted.delete(keyOf(row));
    this.#timer = this.#wanted.size ? setTimeout(() => void this.#ask(), 0) : null;
  }
}

/** The address of a row's rollout; from a search it leads to the match. */
export function pathOfRow(r: string, row: Row, words: string | null): string {
  const query = new URLSearchParams(tryQuery(row));
  if (words) query.set("q", words);
  return `${paths.rollout(r, row.id)}${query.size ? `?${query}` : ""}`;
}
