/** The columns of the table: their names, widths and sort keys. */

import { flat } from "../text/visible";
import type { TermName } from "../words";

export interface Heading {
  key: string;
  name: string;
  sort: string | null;
  first?: "up" | "down"; // the direction of the first click
  right?: boolean;
  about?: string;
  term?: TermName; // the definition at its head
}

export interface Column extends Heading {
  width: string;
}

const MOST_TERMS = 6;
const TERM_PX = 88;
const PLAIN_PX = 1346; // the least width of all columns except those of terms

const REWARD: Column = { key: "reward", name: "Reward", width: "96px", sort: "reward", first: "down", right: true, term: "reward" };
const COLUMNS: Column[] = [
  { key: "task", name: "Task", width: "minmax(150px, 1.6fr)", sort: "task", term: "task" },
  { key: "step", name: "Step", width: "56px", sort: "step", right: true, term: "step" },
  { key: "attempt", name: "Attempt", width: "70px", sort: "attempt", right: true, term: "attempt" },
  { key: "status", name: "Status", width: "96px", sort: "status", term: "status" },
  { key: "stop_reason", name: "Stop reason", width: "minmax(110px, 1fr)", sort: "stop_reason", term: "stop reason" },
  { key: "environment", name: "Environment", width: "minmax(98px, 0.8fr)", sort: "environment", term: "environment" },
  { key: "turns", name: "Turns", width: "62px", sort: "turns", first: "down", right: true, term: "turn" },
  { key: "tool_errors", name: "Tool errors", width: "90px", sort: "tool_errors", first: "down", right: true, about: "tool results that are errors, of all its tool results" },
  { key: "tokens", name: "Sampled", width: "80px", sort: "tokens", first: "down", right: true, term: "sampled token" },
  { key: "trained", name: "Trained", width: "76px", sort: "trained_share", right: true, about: "share of its sampled tokens that train under the cut policy exact" },
  { key: "forks", name: "Forks", width: "62px", sort: "forks", first: "down", right: true, term: "fork" },
  { key: "took", name: "Took", width: "92px", sort: "took", first: "down", right: true },
  { key: "started", name: "Started", width: "92px", sort: "started", first: "down", right: true },
  { key: "id", name: "Id", width: "104px", sort: "id" },
];

/** The reward terms with a column of their own. */
export function shownTerms(terms: string[]): string[] {
  return terms.slice(0, MOST_TERMS);
}

export function columnsFor(terms: string[]): Column[] {
  const own = shownTerms(terms).map((term): Column => ({ key: `term.${term}`, name: flat(term), width: `${TERM_PX}px`, sort: `term.${term}`, first: "down", right: true, about: `${flat(term)}, a term of the reward` }));
  return [REWARD, ...own, ...COLUMNS];
}

export function templateOf(columns: Column[]): string {
  return columns.map((column) => column.width).join(" ");
}

export function leastWidth(terms: string[]): number {
  return PLAIN_PX + TERM_PX * shownTerms(terms).length;
}

/** The order after a click on a column, from the current order; "" is the tape's own. */
export function nextSort(column: Heading, now: string | null): string {
  if (column.sort === null) return now ?? "";
  const up = column.sort, down = `-${column.sort}`;
  const [first, second] = column.first === "down" ? [down, up] : [up, down];
  return now === first ? second : now === second ? "" : first;
}

/** A color for a reward between the least and the largest of the run: orange below the middle, blue above. */
export function rewardTint(reward: number | null, range: [number, number] | null): string {
  if (reward === null || !Number.isFinite(reward) || range === null || range[0] === range[1]) return "";
  const place = (2 * (reward - range[0])) / (range[1] - range[0]) - 1;
  const size = Math.abs(place) > 0.6 ? 2 : Math.abs(place) > 0.15 ? 1 : 0;
  return size === 0 ? "" : `var(--${place < 0 ? "below" : "above"}-${size})`;
}
