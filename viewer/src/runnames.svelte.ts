/** The names of the served runs by their short name, for titles. */

import type { RunRow } from "./api/answers";
import { json } from "./api/client";
import { staticPage } from "./api/embedded";
import { flat } from "./text/visible";

const names = $state<Record<string, string>>({});
let asked = false;

export function runName(r: string): string {
  if (!asked) {
    asked = true;
    json<{ runs: RunRow[] }>("/api/runs").then(
      (answer) => rememberNames(answer.runs),
      () => undefined, // the view itself reports the error
    );
  }
  return flat(names[r] ?? staticPage?.name ?? r);
}

/** The label of a run; other runs may have the same name. */
export function runLabel(run: RunRow): string {
  return flat(run.name === run.r ? run.name : `${run.name} (${run.r})`);
}

export function rememberNames(runs: RunRow[]): void {
  for (const run of runs) names[run.r] = run.name;
}
