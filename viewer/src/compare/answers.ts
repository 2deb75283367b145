/** The server's answers about two sides, and about two rollouts. */

import type { Message, Num, Progress, Row } from "../api/answers";

export type Letter = "a" | "b";

export interface ComparedRun {
  r: string;
  name: string;
  filters: Record<string, string>;
  rollouts: number;
  attempts: number; // with a reward
  mean: Num;
  steps: number[];
  versions: string[];
  models: string[];
  agents: string[];
  progress: Progress;
}

/** A measure over the tasks that both sides have, with its test. */
export interface MeasureResult {
  measure: string;
  tasks: number;
  a: Num;
  b: Num;
  difference: Num;
  low: Num; // the 95 % interval
  high: Num;
  p: Num;
  higher: number;
  lower: number;
  same: number;
  sign_p: Num;
  verdict: "higher" | "lower" | "same" | "unclear" | "unknown";
  statement: string;
}

export interface TaskSide {
  rollouts: number;
  attempts: number;
  solved: number;
  mean: Num; // of the measure
  first_step: number;
  last_step: number;
  rollout: string; // the one nearest to the mean reward of the task
  try: number;
}

export interface ComparedTask {
  source: string | null;
  task: string;
  environment: string | null;
  a: TaskSide | null;
  b: TaskSide | null;
  difference: Num;
}

export interface Directions {
  higher: number;
  lower: number;
  same: number;
  only_a: number;
  only_b: number;
  unrewarded: number;
}

export interface ComparisonAnswer extends Directions {
  a: ComparedRun;
  b: ComparedRun;
  solved_at: number;
  measure: string;
  method: string;
  result: MeasureResult;
  measures: MeasureResult[];
  tasks: number;
  unnamed: [number, number];
  on_both: number;
  matched: number;
  rows: ComparedTask[];
}

export type PairSide = Row & { r: string; run: string; messages: Message[]; attempts: Row[]; left_out: number };

export interface PairAnswer {
  a: PairSide;
  b: PairSide;
}
