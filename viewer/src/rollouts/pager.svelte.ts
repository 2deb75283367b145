/** Rows of a table of any length, fetched a page at a time as they come into view. */

import type { Progress, Row, RowsAnswer } from "../api/answers";
import { AnswerError } from "../api/client";
import { tell } from "../api/live.svelte";
import { rowsOf } from "./query";

export const PAGE = 200;
const MOST_SOUGHT = 6; // pages that are fetched to find the kept row again

/** The row that the reader looks at, and its place. */
export interface Kept {
  id: string;
  tried: number;
  index: number;
}

interface Batch {
  pages: number[];
  control: AbortController;
}

export class Pager {
  total = $state(0);
  matched = $state<number | null>(null); // null if unknown yet
  search = $state.raw<{ searched: number; total: number } | null>(null); // how much was searched
  progress = $state.raw<Progress | null>(null);
  terms = $state.raw<string[]>([]); // of rewards, the most common first
  range = $state.raw<[number, number] | null>(null); // the least and the largest reward of the run
  error = $state.raw<AnswerError | null>(null);
  /** Shown rows are replaced only together with the page that now has this row. */
  kept: Kept | null = null;
  #pages = $state.raw(new Map<number, Row[]>());
  #batches = new Set<Batch>();
  #latest: number[] = []; // the pages that were loaded last, together
  #stale = new Set<number>();
  #changes = 0; // number of changes of the run: an answer requested before the last change may lack it
  #wanted: [number, number] = [0, 0];

  constructor(
    readonly r: string,
    readonly query: string,
  ) {}

  row(index: number): Row | null {
    return this.#pages.get(Math.floor(index / PAGE))?.[index % PAGE] ?? null;
  }

  /** The place of a rollout in the rows that were loaded last, or null. */
  find(id: string, tried: number): number | null {
    for (const page of this.#latest) {
      const at = placeIn(this.#pages.get(page) ?? [], id, tried);
      if (at >= 0) return page * PAGE + at;
    }
    return null;
  }

  /** Fetch missing and outdated pages of `[first, last]`; requests for pages far away are dropped. */
  want(first: number, last: number): void {
    this.#wanted = [first, last];
    const from = Math.floor(Math.max(0, first) / PAGE);
    const to = Math.floor(Math.max(0, last) / PAGE);
    for (const batch of this.#batches) {
      if (batch.pages.every((page) => page < from - 1 || page > to + 1)) this.#cancel(batch);
    }
    const asked = new Set([...this.#batches].flatMap((batch) => batch.pages));
    const outdated: number[] = [];
    for (let page = from; page <= to; page++) {
      if (asked.has(page)) continue;
      if (!this.#pages.has(page)) void this.#fetch([page]);
      else if (this.#stale.has(page)) outdated.push(page);
    }
    // Rows may move between pages, so all shown pages are replaced together.
    if (outdated.length) void this.#fetch(outdated);
  }

  /** Reload the rows in view after a change of the run; they stay until then. */
  refresh(first: number, last: number): void {
    this.#changes += 1;
    this.#stale = new Set(this.#pages.keys());
    this.want(first, last);
  }

  close(): void {
    for (const batch of this.#batches) this.#cancel(batch);
    tell(this, null);
  }

  #cancel(batch: Batch): void {
    batch.control.abort();
    this.#batches.delete(batch);
  }

  async #fetch(pages: number[]): Promise<void> {
    const batch: Batch = { pages, control: new AbortController() };
    const { signal } = batch.control;
    const changes = this.#changes;
    this.#batches.add(batch);
    try {
      const answers = await this.#ask(pages, signal);
      const sought = this.#pagesToSeek(answers);
      for (const [page, answer] of sought.length ? await this.#ask(sought, signal) : []) answers.set(page, answer);
      if (!signal.aborted) this.#show(answers, changes);
    } catch (error) {
      if (signal.aborted) return;
      this.error = error instanceof AnswerError ? error : new AnswerError(String(error), 0);
      if (this.matched !== null) tell(this, this.error.message);
    } finally {
      this.#batches.delete(batch);
    }
    if (changes !== this.#changes && !signal.aborted && this.error === null) this.want(...this.#wanted);
  }

  async #ask(pages: number[], signal: AbortSignal): Promise<Map<number, RowsAnswer>> {
    const answers = await Promise.all(pages.map((page) => rowsOf(this.r, this.query, page * PAGE, PAGE, signal)));
    return new Map(answers.map((answer, index) => [pages[index] ?? 0, answer]));
  }

  /** The pages on which the kept row may be now, if it is no longer on one of these pages because of new rows. */
  #pagesToSeek(answers: Map<number, RowsAnswer>): number[] {
    const kept = this.kept;
    const newest = [...answers.values()].at(-1);
    if (kept === null || newest === undefined || this.matched === null) return [];
    const from = Math.floor(kept.index / PAGE);
    if (!answers.has(from) || [...answers.values()].some((answer) => placeIn(answer.rows, kept.id, kept.tried) >= 0)) return [];
    const to = Math.floor((kept.index + Math.max(0, newest.matched - this.matched)) / PAGE);
    const pages = Array.from({ length: to - from }, (_, index) => from + 1 + index).filter((page) => !answers.has(page));
    return pages.length <= MOST_SOUGHT ? pages : [...pages.slice(0, MOST_SOUGHT / 2), ...pages.slice(-MOST_SOUGHT / 2)];
  }

  #show(answers: Map<number, RowsAnswer>, changes: number): void {
    const pages = new Map(this.#pages);
    for (const [page, answer] of answers) {
      pages.set(page, answer.rows);
      if (changes === this.#changes) this.#stale.delete(page);
      this.total = answer.total;
      this.matched = answer.matched;
      this.search = answer.search ?? null;
      this.progress = answer.progress ?? null;
      this.terms = answer.terms ?? termsIn(answer.rows);
      this.range = answer.reward_range ?? null;
    }
    this.#pages = pages;
    this.#latest = [...answers.keys()];
    this.error = null;
    tell(this, null);
  }
}

function placeIn(rows: Row[], id: string, tried: number): number {
  return rows.findIndex((row) => row.id === id && row.try === tried);
}

/** The terms of some rewards, since an exported page does not list those of the run. */
function termsIn(rows: Row[]): string[] {
  return [...new Set(rows.flatMap((row) => Object.keys(row.terms ?? {})))];
}
