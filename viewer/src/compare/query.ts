/** The address of a comparison: which sides, which measure, which tasks. */

import type { Num } from "../api/answers";
import { float, number } from "../format";
import { plain } from "../words";
import type { Letter } from "./answers";

const SIDE = ["step", "version", "model", "agent", "environment", "source", "tag"] as const;
const NAMES = ["a", ...SIDE.map((name) => `a_${name}`), "b", ...SIDE.map((name) => `b_${name}`), "by", "solved_at", "measure", "which", "name", "sort"];

/** Only what the server knows, in a steady order: two equal views have one address. */
export function comparisonQuery(address: URLSearchParams): URLSearchParams {
  const kept = new URLSearchParams();
  for (const name of NAMES) {
    const value = address.get(name);
    if (value) kept.set(name, value);
  }
  return kept;
}

/** The same with another run on one side, all of it. */
export function withRun(query: URLSearchParams, letter: Letter, r: string): URLSearchParams {
  const next = new URLSearchParams([...query].filter(([name]) => !name.startsWith(`${letter}_`)));
  next.set(letter, r);
  return comparisonQuery(next);
}

/** Both sides in each other's place. */
export function swapped(query: URLSearchParams): URLSearchParams {
  const other = (name: string) => (/^[ab](_|$)/.test(name) ? (name.startsWith("a") ? "b" : "a") + name.slice(1) : name);
  return comparisonQuery(new URLSearchParams([...query].map(([name, value]) => [other(name), value])));
}

/** What to compare a run with: another run, both in the order in which they were given; else its last step with its first. */
export function firstComparison(r: string, runs: string[], steps: number[]): Record<string, string> | null {
  const other = runs.find((one) => one !== r);
  if (other !== undefined) return runs.indexOf(other) < runs.indexOf(r) ? { a: other, b: r } : { a: r, b: other };
  const [first, last] = [steps[0], steps.at(-1)];
  return first === undefined || last === undefined || first === last ? null : { a: r, a_step: String(first), b: r, b_step: String(last) };
}

const MEASURES: Record<string, string> = { reward: "mean reward", solved: "solved share", turns: "turns", tokens: "sampled tokens" };

export function measureName(measure: string): string {
  return MEASURES[measure] ?? plain(measure.replace(/^term\./, ""));
}

export function chance(p: Num): string {
  const x = float(p);
  return x === null ? "–" : x < 0.001 ? "< 0.001" : number(x, 2);
}
