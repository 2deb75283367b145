/** Rows of a table of any length, fetched a page at a time as they come into view. */

import type { Row } from "../api/answers";
import { AnswerError } from "../api/client";
import { tell } from "../api/live.svelte";
import { rowsOf } from "./query";

export const PAGE = 200;

export class Pager {
  total = $state(0);
  matched = $state<number | null>(null); // null: not known yet
  unsearched = $state(0); // ended rollouts that a search has not looked through yet
  error = $state.raw<AnswerError | null>(null);
  #pages = $state.raw(new Map<number, Row[]>());
  #asked = new Map<number, AbortController>();
  #stale = new Set<number>();

  constructor(
    readonly r: string,
    readonly query: string,
  ) {}

  row(index: number): Row | null {
    return this.#pages.get(Math.floor(index / PAGE))?.[index % PAGE] ?? null;
  }

  /** Where a rollout is among the rows that were fetched; null: not there. */
  find(id: string, tried: number): number | null {
    for (const [page, rows] of this.#pages) {
      const at = rows.findIndex((row) => row.id === id && row.try === tried);
      if (at >= 0) return page * PAGE + at;
    }
    return null;
  }

  /** Fetch what is missing of `[first, last]`; pages far away are no longer waited for. */
  want(first: number, last: number): void {
    const from = Math.floor(Math.max(0, first) / PAGE);
    const to = Math.floor(Math.max(0, last) / PAGE);
    for (const [page, control] of this.#asked) {
      if (page < from - 1 || page > to + 1) {
        control.abort();
        this.#asked.delete(page);
      }
    }
    for (let page = from; page <= to; page++) {
      if ((!this.#pages.has(page) || this.#stale.has(page)) && !this.#asked.has(page)) void this.#fetch(page);
    }
  }

  /** Something of the run changed: what is in view is fetched again, and stays until then. */
  refresh(first: number, last: number): void {
    this.#stale = new Set(this.#pages.keys());
    this.want(first, last);
  }

  close(): void {
    for (const control of this.#asked.values()) control.abort();
    tell(this, null);
  }

  async #fetch(page: number): Promise<void> {
    const control = new AbortController();
    this.#asked.set(page, control);
    try {
      const answer = await rowsOf(this.r, this.query, page * PAGE, PAGE, control.signal);
      this.#pages = new Map(this.#pages).set(page, answer.rows);
      this.#stale.delete(page);
      this.total = answer.total;
      this.matched = answer.matched;
      this.unsearched = answer.search ? answer.search.ended - answer.search.indexed : 0;
      this.error = null;
      tell(this, null);
    } catch (error) {
      if (control.signal.aborted) return;
      this.error = error instanceof AnswerError ? error : new AnswerError(String(error), 0);
      if (this.matched !== null) tell(this, this.error.message);
    } finally {
      if (this.#asked.get(page) === control) this.#asked.delete(page);
    }
  }
}
