/** The server's answers. Numbers that JSON cannot write come as `{"$float": "nan"}`. */

import type { Lengths, Preset } from "./steps";
import type { Annotations } from "../notes/annotating.svelte";

export type Num = number | { $float: "nan" | "inf" | "-inf" } | null | undefined;
export type Counts = Record<string, number>;

/** The progress of a run's index, in rollouts: read from the tape, summarized (forks and ledger), and searchable. */
export interface Progress {
  indexed: number;
  total: number;
  summarized: number;
  searchable: number;
}

export interface RunRow {
  r: string;
  name: string;
  location: string;
  live: boolean;
  steps: number;
  tasks: number;
  rollouts: number;
  statuses: Counts;
  mean_reward: Num;
  sampled_tokens: number;
  last_activity_ns: number | null;
  problems: number;
  progress?: Progress;
}

export interface Spread {
  rollouts: number; // with a finite reward
  mean: Num;
  std: Num;
  min: Num;
  max: Num;
  quantiles: Num[]; // 10, 25, 50, 75, 90 %
}

export interface StepRow {
  step: number;
  rollouts: number;
  reward: Spread | null;
  lengths: Lengths;
  ledger: Counts;
  fork_causes: Counts;
  staleness: Counts;
  trainer: {
    mismatch_kl: Num;
    max_mismatch_kl?: Num;
    max_mismatch_at?: { rollout: string; sample_id: string; token: number; place?: string } | null; // where the largest one is
    entropy: Num;
    masked_high: Num;
    masked_low: Num;
  } | null;
}

export interface SolvedCounts {
  none: number;
  some: number;
  all: number;
  unrewarded: number;
}

export interface TaskRow {
  task: string | null;
  source: string | null;
  group: string | null; // null if it has several
  environment: string | null;
  rollouts: number;
  attempts: number; // with a reward
  solved: number;
  mean: Num;
  best: Num;
  spread: Num;
  first_step: number;
  last_step: number;
  by_step: [number, number][]; // the mean reward at each step
  turns: Num;
  tokens: Num;
}

/** The tasks of a run, or of one of its steps. */
export interface TasksAnswer extends SolvedCounts {
  solved_at: number; // the least reward at which a task counts as solved
  k: number; // the most common number of attempts in a group
  tasks: number;
  pass_1: Num;
  pass_k: Num;
  by_step: (SolvedCounts & { step: number; tasks: number; pass_1: Num; pass_k: Num })[];
  matched: number;
  rows: TaskRow[];
  progress?: Progress;
}

/** Where a trainer's token records of a step and the tape disagree. */
export interface TrainedCheck {
  step: number;
  check: {
    records: number;
    disagreeing: number;
    unnamed: number;
    rules: Counts;
    by_task: Counts; // records with disagreements
    by_turn: { turn: number; findings: number }[];
    findings: TokenFinding[]; // the first ones
    unseen: Counts; // by reason: samples of the step's groups that no record names
  } | null;
}

/** The mismatch between trainer and engine over some trained tokens, and the place of the largest. */
export interface MismatchFigures {
  records: number;
  tokens: number;
  mean: number;
  max: number;
  at: { rollout: string; sample_id: string; token: number; place: string };
}

export interface MismatchesAnswer {
  step: number;
  mismatches: {
    tasks: number;
    by_task: (MismatchFigures & { task: string | null })[]; // the worst ones
    by_turn: (MismatchFigures & { turn: number })[];
    rollouts: number;
    looked_at: number; // those whose turns are counted
  } | null;
}

export interface TokenFinding {
  rule: string;
  record: string | null;
  sample: string | null;
  rollout: string | null;
  turn: string | null;
  token: number | null;
  what: string;
  advice: string;
}

export interface Histogram {
  edges: Num[];
  counts: number[];
  log: boolean; // bins have equal ratios
  quantiles: Num[]; // 50, 90, 99 %
}

export interface Overview {
  name: string;
  location?: string;
  live?: boolean;
  rollouts?: number;
  tasks?: number;
  last_activity_ns?: number | null;
  problems?: number;
  problem_list?: string[]; // descriptions of the first ones
  reward: Spread | null;
  rewards_not_finite: number;
  progress?: Progress; // absent if everything is indexed
  turns: number;
  sampled_tokens: number;
  by_step: StepRow[];
  by_time: { at_ns: number; reward: Spread }[];
  reward_histogram: Histogram | null;
  statuses: Counts;
  stop_reasons: Counts;
  turns_histogram: Histogram | null;
  tokens_histogram: Histogram | null;
  ledger: Counts;
  fork_causes: Counts;
  fork_cause_rollouts?: Counts; // how many rollouts have such forks
  versions: string[];
  environments: Counts;
  agents: Counts;
  tags: Counts;
  presets: Preset[];
  notes?: number; // of all rollouts
}

export interface Row {
  id: string;
  try: number;
  tries?: number; // of the rollout
  short: string;
  step: number;
  source: string | null;
  task: string | null;
  attempt: number;
  group: string;
  environment: string | null;
  agent: string | null;
  model: string | null;
  status: string;
  stop_reason: string | null;
  reason: string | null;
  reward: Num;
  terms: Record<string, Num>; // of the reward
  tool_results: number | null; // these two are null until they are counted
  tool_errors: number | null;
  turns: number;
  sampled_tokens: number;
  trained_tokens: number | null; // these three are null until they are derived
  branches: number | null;
  forks: number | null;
  tags: string[];
  inner_tags?: string[]; // of its turns and tokens
  notes?: number;
  filter: string | null;
  started_ns: number | null;
  ended_ns: number | null;
  live: boolean;
  problems?: number; // number of unreadable parts
}

export interface RowsAnswer {
  total: number;
  matched: number;
  rows: Row[];
  terms?: string[]; // of rewards, the most common first; absent in exported pages
  reward_range?: [number, number] | null; // the least and the largest finite reward of the run
  snapshot: number;
  progress?: Progress;
  search?: { searched: number; total: number }; // how many of the rollouts were searched
}

/** The line of a rollout with the most matches of a search. */
export interface FoundLine {
  role: string;
  parts: { text: string; found: boolean }[];
}

export interface ToolCall {
  id: string | null;
  name: string;
  arguments: unknown;
}

/** An image in a message: its type is null if it is not shown, and `why` is then the reason. */
export interface MessageImage {
  type: string | null;
  bytes: number;
  width?: number | null;
  height?: number | null;
  why?: string | null;
}

export interface Message {
  role: string;
  text: string;
  reasoning?: string | null;
  tool_calls?: ToolCall[] | null;
  tool_call_id?: string | null;
  name?: string | null;
  images?: MessageImage[] | null;
  is_error?: boolean; // the result of a call that failed
  raw?: unknown;
  digest?: string | null;
  key?: string | null;
  cut?: number | null; // characters of the whole text, if `text` is only its beginning
  reasoning_cut?: number | null;
  after?: string | null; // in a group: the event between it and the previous message
}

export interface GroupAnswer {
  group: string;
  task: string | null;
  step: number;
  task_data: unknown;
  rollouts: (Row & { messages: Message[] })[]; // of a large group the first ones, in an exported page those that were chosen
  attempts: number; // of the whole group
  reward: Spread | null; // likewise
}

export interface Turn {
  id: string;
  sequence: number;
  parent: string | null;
  started_ns: number | null;
  ended_ns: number | null;
  finish: string;
  stop_reason?: string | null;
  prompt_tokens: number;
  new_prompt_tokens: number;
  sampled_tokens: number;
  reply: Message | null;
  new_messages: Message[];
  kept_messages?: number | null;
  versions: string[];
  delivery: string;
  flags: string[];
  ignored_params?: string[];
  auxiliary: string | null;
  reward: Num;
  sampling?: Record<string, unknown>; // parameters as they were applied
  fates: Counts;
  error?: string | null;
}

export interface Fork {
  turn: string;
  parent: string;
  cause: string;
  first_difference: {
    at_text?: number | null;
    text: [string, string] | null;
    at_tokens?: number | null;
    tokens: [number[], number[]] | null;
    token_texts?: [string[], string[]] | null;
  } | null;
}

export interface Session {
  id: string;
  turns: Turn[];
  branches: { leaf: string; main: boolean }[];
  forks: Fork[];
  tools?: string[];
  tool_definitions?: ToolDefinition[];
}

export interface ToolDefinition {
  name: string;
  description: string | null;
  parameters: unknown;
}

export interface SampleRow {
  id: string;
  index: number;
  session: string;
  tokens: number;
  trained: number;
  reward: Num;
  advantage: Num;
  loss_weight: Num;
  last_turn?: string;
}

export interface RolloutAnswer {
  row: Row;
  head: Record<string, unknown>;
  outcome: Record<string, unknown>;
  took_s?: number | null; // by its turns; an import records within a moment what took hours
  events: Record<string, unknown>[];
  trace: Record<string, unknown> | null;
  sessions: Session[];
  samples: SampleRow[];
  policy: string;
  ledger: Counts;
  annotations?: Annotations;
  tries: number[];
  problems?: string[]; // its lost parts
  as_if_finished?: boolean; // it is running, and shown as if it had ended now
}

export interface ComparedSpan {
  start: number;
  stop: number;
  origin: string;
  turn: string;
  fate: string | null;
}

export interface ComparedSide {
  policy: string;
  ledger: Counts;
  samples: (SampleRow & { spans?: ComparedSpan[] | null })[]; // only the first ones have spans
}

export interface CompareAnswer {
  left: ComparedSide;
  right: ComparedSide;
  turns: { turn: string; sequence: number; session: string; sampled: number; left: Counts; right: Counts }[];
}
