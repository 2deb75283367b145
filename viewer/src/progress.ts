/** What the page may state while the index of a run is not current: its progress, and nothing about the rest. */

import type { Progress } from "./api/answers";
import { count } from "./format";

export function isIndexed(progress: Progress | null | undefined): boolean {
  return !progress || progress.indexed >= progress.total;
}

/** Whether forks and ledgers of all rollouts are known. */
export function isSummarized(progress: Progress | null | undefined): boolean {
  return isIndexed(progress) && (!progress || progress.summarized >= progress.total);
}

export function indexedText(progress: Progress): string {
  return `indexed ${count(progress.indexed)} of ${count(progress.total)}`;
}

export function summarizedText(progress: Progress): string {
  return isIndexed(progress) ? `summarized ${count(progress.summarized)} of ${count(progress.total)}` : indexedText(progress);
}

export function searchText(search: { searched: number; total: number }): string {
  return `search covers ${count(search.searched)} of ${count(search.total)}`;
}
