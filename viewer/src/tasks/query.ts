/** The query of the table of tasks, and its answer from the rows of an exported page. */

import type { TaskRow, TasksAnswer } from "../api/answers";
import { json } from "../api/client";
import { isStatic } from "../api/embedded";
import { float } from "../format";
import { changed, pick, sorted } from "../query";
import { paths } from "../route.svelte";

export const PAGE = 100, MOST = 500; // tasks of an answer
const NAMES = isStatic ? ["solved_by", "name", "sort"] : ["step", "solved_by", "solved_at", "name", "sort"]; // an export has one table

export const taskQuery = (address: URLSearchParams): URLSearchParams => pick(address, NAMES);

export async function tasksOf(r: string, query: string, limit: number, signal?: AbortSignal): Promise<TasksAnswer> {
  const path = `/api/${encodeURIComponent(r)}/tasks`;
  if (isStatic) return chosenTasks(await json<TasksAnswer>(path), new URLSearchParams(query), limit);
  return await json<TasksAnswer>(`${path}?${query}${query ? "&" : ""}limit=${limit}`, signal);
}

export const keyOf = (row: TaskRow): string => JSON.stringify([row.source, row.task, row.group]);

/** The address of the attempts at a task: side by side, or as rows if they are of several groups. */
export function attemptsOf(r: string, row: TaskRow, within: Record<string, string>): string {
  if (row.group !== null) return paths.group(r, row.group);
  return paths.rollouts(r, changed(new URLSearchParams(), { source: row.source, task: row.task, ...within }));
}

/** The mean reward of the last step minus that of the first; null if only one step has rewards. */
export function change(row: TaskRow): number | null {
  const first = row.by_step[0], last = row.by_step.at(-1);
  return first && last && first !== last ? last[1] - first[1] : null;
}

const SORT_BY: Record<string, (row: TaskRow) => number | string | null> = {
  task: (row) => row.task, environment: (row) => row.environment, attempts: (row) => row.attempts,
  solved: (row) => (row.attempts ? row.solved / row.attempts : null), mean: (row) => float(row.mean), best: (row) => float(row.best),
  spread: (row) => float(row.spread), change, turns: (row) => float(row.turns), tokens: (row) => float(row.tokens), step: (row) => row.last_step,
};

export function solvedBy(row: TaskRow): "none" | "some" | "all" | "unrewarded" {
  return row.attempts === 0 ? "unrewarded" : row.solved === 0 ? "none" : row.solved < row.attempts ? "some" : "all";
}

function chosenTasks(all: TasksAnswer, query: URLSearchParams, limit: number): TasksAnswer {
  const which = query.get("solved_by"), part = query.get("name")?.toLowerCase() ?? "";
  const rows = all.rows.filter((row) => (which === null || solvedBy(row) === which) && (row.task ?? row.group ?? "").toLowerCase().includes(part));
  return { ...all, matched: rows.length, rows: sorted(rows, SORT_BY, query.get("sort") ?? "mean").slice(0, limit) };
}
