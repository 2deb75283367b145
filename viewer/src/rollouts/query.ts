/** The query of the table: filters and order from the address. */

import type { Row, RowsAnswer } from "../api/answers";
import { json } from "../api/client";
import { isStatic } from "../api/embedded";
import { float } from "../format";
import { BOOKMARK } from "../notes/annotating.svelte";
import { pick, sorted } from "../query";

export const FILTERS = [
  "status", "stop_reason", "source", "task", "task_like", "environment", "agent", "model", "tag", "step", "group", "cause",
  "min_reward", "max_reward", "min_tokens", "max_tokens", "min_turns", "max_turns", "min_tool_errors", "max_tool_errors", "min_forks",
  "rewarded", "truncated", "short", "edited_tests", "far", "filtered", "noted", "bookmarked", "q",
] as const;
export type Filter = (typeof FILTERS)[number];

export const FILTER_WORDS: Record<Filter, string> = {
  status: "status", stop_reason: "stop reason", source: "source", task: "task", task_like: "task contains", environment: "environment",
  agent: "agent", model: "model", tag: "tag", step: "step", group: "group", cause: "fork by", min_reward: "reward ≥", max_reward: "reward ≤",
  min_tokens: "tokens ≥", max_tokens: "tokens ≤", min_turns: "turns ≥", max_turns: "turns ≤", min_tool_errors: "tool errors ≥",
  max_tool_errors: "tool errors ≤", min_forks: "forks ≥", rewarded: "reward above 0", truncated: "truncated", short: "very short",
  edited_tests: "edited tests", far: "reward far from its group", filtered: "filtered out of training", noted: "noted", bookmarked: "bookmarked", q: "messages or notes match",
};
// The rows of an export lack these.
const SERVED_ONLY: readonly string[] = ["cause", "short", "truncated", "edited_tests", "far"] satisfies Filter[];

const NAMES = [...FILTERS, "sort"].filter((name) => !isStatic || !SERVED_ONLY.includes(name));

export const tableQuery = (address: URLSearchParams): URLSearchParams => pick(address, NAMES);

export async function rowsOf(r: string, query: string, offset: number, limit: number, signal?: AbortSignal): Promise<RowsAnswer> {
  const path = `/api/${encodeURIComponent(r)}/rollouts`;
  if (isStatic) return chosenRows(await json<RowsAnswer>(path), new URLSearchParams(query), offset, limit);
  return await json<RowsAnswer>(`${path}?${query}${query ? "&" : ""}offset=${offset}&limit=${limit}`, signal);
}

const SORT_BY: Record<string, (row: Row) => number | string | null> = {
  reward: (row) => float(row.reward), started: (row) => row.started_ns, turns: (row) => row.turns,
  tokens: (row) => row.sampled_tokens, forks: (row) => row.forks, task: (row) => row.task, status: (row) => row.status,
  step: (row) => row.step, attempt: (row) => row.attempt, stop_reason: (row) => row.stop_reason, environment: (row) => row.environment,
  tool_errors: (row) => row.tool_errors, id: (row) => row.id, took: (row) => (row.started_ns === null || row.ended_ns === null ? null : row.ended_ns - row.started_ns),
  trained_share: (row) => (row.trained_tokens === null || row.sampled_tokens === 0 ? null : row.trained_tokens / row.sampled_tokens),
};

/** Whether a rollout has a tag, of its own or of a turn or token. */
export function hasTag(row: Row, tag: string): boolean {
  return row.tags.includes(tag) || (row.inner_tags ?? []).includes(tag);
}

function passes(row: Row, query: URLSearchParams): boolean {
  const is = (name: string, value: string | number | null) => !query.has(name) || query.get(name) === String(value);
  const limit = (name: string) => (query.has(name) ? Number(query.get(name)) : null);
  const atLeast = (name: string, value: number | null) => limit(name) === null || (value !== null && value >= (limit(name) ?? 0));
  const atMost = (name: string, value: number | null) => limit(name) === null || (value !== null && value <= (limit(name) ?? 0));
  return (
    is("status", row.status) && is("stop_reason", row.stop_reason) && is("source", row.source) && is("task", row.task) && is("group", row.group) &&
    is("environment", row.environment) && is("agent", row.agent) && is("model", row.model) && is("step", row.step) &&
    (row.task ?? "").toLowerCase().includes((query.get("task_like") ?? "").toLowerCase()) &&
    (!query.has("rewarded") || (query.get("rewarded") === "yes") === ((float(row.reward) ?? 0) > 0)) &&
    atLeast("min_turns", row.turns) && atMost("max_turns", row.turns) && atLeast("min_tool_errors", row.tool_errors) && atMost("max_tool_errors", row.tool_errors) &&
    (!query.has("tag") || hasTag(row, query.get("tag") ?? "")) &&
    (!query.has("noted") || (query.get("noted") === "yes") === ((row.notes ?? 0) > 0)) &&
    (!query.has("bookmarked") || (query.get("bookmarked") === "yes") === hasTag(row, BOOKMARK)) &&
    (!query.has("filtered") || (query.get("filtered") === "yes") === (row.filter !== null)) &&
    atLeast("min_reward", float(row.reward)) && atMost("max_reward", float(row.reward)) &&
    atLeast("min_tokens", row.sampled_tokens) && atMost("max_tokens", row.sampled_tokens) && atLeast("min_forks", row.forks)
  );
}

/** The server's answer, computed from the rows of an exported page. */
export function chosenRows(all: RowsAnswer, query: URLSearchParams, offset: number, limit: number): RowsAnswer {
  const rows = all.rows.filter((row) => passes(row, query));
  const sort = query.get("sort") ?? "";
  const term = /^-?term\.(.*)$/s.exec(sort)?.[1];
  const keys = term === undefined ? SORT_BY : { [`term.${term}`]: (row: Row) => float(row.terms[term]) };
  return { ...all, matched: rows.length, rows: sorted(rows, keys, sort).slice(offset, offset + limit) };
}
