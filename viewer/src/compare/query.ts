/** The address of a comparison: its sides, its measure and its tasks. */

import type { Num } from "../api/answers";
import { json } from "../api/client";
import { isStatic } from "../api/embedded";
import { float, number } from "../format";
import { pick, sorted } from "../query";
import { flat } from "../text/visible";
import type { ComparedTask, ComparisonAnswer, Letter } from "./answers";

const SIDE = ["step", "version", "model", "agent", "environment", "source", "tag"] as const;
const NAMES = ["a", ...SIDE.map((name) => `a_${name}`), "b", ...SIDE.map((name) => `b_${name}`), "by", "solved_at", "measure", "which", "name", "sort"];

export const comparisonQuery = (address: URLSearchParams): URLSearchParams => pick(address, NAMES);

/** The comparison for a query. An export has each measure, and filters the tasks itself. */
export async function comparisonOf(query: URLSearchParams, limit: number, signal?: AbortSignal): Promise<ComparisonAnswer> {
  if (!isStatic) return await json<ComparisonAnswer>(`/api/compare?${query}&limit=${limit}`, signal);
  return chosenTasks(await json<ComparisonAnswer>(`/api/compare?measure=${query.get("measure") ?? "reward"}`), query, limit);
}

const SORT_BY: Record<string, (row: ComparedTask) => number | string | null> = {
  task: (row) => row.task, environment: (row) => row.environment, difference: (row) => float(row.difference), a: (row) => float(row.a?.mean), b: (row) => float(row.b?.mean),
  change: (row) => { const by = float(row.difference); return by === null ? null : Math.abs(by); },
  attempts: (row) => (row.a?.attempts ?? 0) + (row.b?.attempts ?? 0),
  solved_a: (row) => (row.a?.attempts ? row.a.solved / row.a.attempts : null), solved_b: (row) => (row.b?.attempts ? row.b.solved / row.b.attempts : null),
};

function direction(row: ComparedTask): string {
  const by = float(row.difference);
  if (row.a === null || row.b === null) return row.a === null ? "only_b" : "only_a";
  return by === null ? "unrewarded" : Math.abs(by) <= 1e-9 ? "same" : by > 0 ? "higher" : "lower";
}

function chosenTasks(all: ComparisonAnswer, query: URLSearchParams, limit: number): ComparisonAnswer {
  const which = query.get("which"), part = query.get("name")?.toLowerCase() ?? "";
  const rows = all.rows.filter((row) => (which === null || direction(row) === which) && row.task.toLowerCase().includes(part));
  return { ...all, matched: rows.length, rows: sorted(rows, SORT_BY, query.get("sort") ?? "-change").slice(0, limit) };
}

/** The query with another whole run on one side. */
export function withRun(query: URLSearchParams, letter: Letter, r: string): URLSearchParams {
  const next = new URLSearchParams([...query].filter(([name]) => !name.startsWith(`${letter}_`)));
  next.set(letter, r);
  return comparisonQuery(next);
}

/** The query with both sides exchanged. */
export function swapped(query: URLSearchParams): URLSearchParams {
  const other = (name: string) => (/^[ab](_|$)/.test(name) ? (name.startsWith("a") ? "b" : "a") + name.slice(1) : name);
  return comparisonQuery(new URLSearchParams([...query].map(([name, value]) => [other(name), value])));
}

/** The default comparison of a run: with another run, both in the given order; else of its last step with its first. */
export function firstComparison(r: string, runs: string[], steps: number[]): Record<string, string> | null {
  const other = runs.find((one) => one !== r);
  if (other !== undefined) return runs.indexOf(other) < runs.indexOf(r) ? { a: other, b: r } : { a: r, b: other };
  const [first, last] = [steps[0], steps.at(-1)];
  return first === undefined || last === undefined || first === last ? null : { a: r, a_step: String(first), b: r, b_step: String(last) };
}

const MEASURES: Record<string, string> = { reward: "mean reward", solved: "solved share", turns: "turns", tokens: "sampled tokens" };

export function measureName(measure: string): string {
  return MEASURES[measure] ?? flat(measure.replace(/^term\./, ""));
}

export function chance(p: Num): string {
  const x = float(p);
  return x === null ? "–" : x < 0.001 ? "< 0.001" : number(x, 2);
}
