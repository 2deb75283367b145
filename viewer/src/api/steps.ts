/** The server's answers about the change from one step to another. Pairs have the other step first, then the step itself. */

import type { Num } from "./answers";

export interface Difference {
  means: [number, number];
  counts: [number, number];
  by: number;
  error: number | null; // the standard error of `by`; null if there is only one task
  tasks: number;
}

/** Some of the rollouts, such as those of a task, and their part of the change. */
export interface Kind {
  name: string | [number, number] | null; // a range of lengths; null without lengths
  filters: Record<string, string> | null;
  counts: [number, number];
  means: [number | null, number | null];
  part: number; // of the change: rewarded + mixed
  rewarded: number; // because their rewards differ
  mixed: number; // because there are more or fewer of them
  error: number | null; // of the difference of means
}

export interface Kinds {
  name: string;
  also: string[]; // other ways to sort rollouts with the same kinds
  kinds: Kind[]; // those with the largest parts
  others: number; // number of kinds that are left out
  others_part: number;
  rewarded: number;
  mixed: number;
}

export interface ChangeAnswer {
  step: number;
  against: number | null; // null if no other step has rewards
  neighbors: number[];
  change: Difference | null;
  tasks?: { shared: number; only: [number, number]; by: Num; error: number | null; up: number; down: number };
  by?: Kinds[];
  terms?: { rows: (Difference & { name: string })[]; add_up: boolean };
  measures?: (Difference & { name: string })[];
}

/** Figures of a step's rollouts. A share consists of a count, and the number of rollouts for which it is known. */
export interface Lengths {
  turns: number[]; // the mean, then the 10, 50 and 90 % quantiles; empty if no rollout has ended
  tokens: number[];
  truncated: [number, number];
  tool_errors: [number, number]; // of tool results
  with_tool_errors: [number, number];
  statuses: Record<string, number>;
  stop_reasons: Record<string, number>;
}

/** A named set of filters, and how many rollouts match it. */
export interface Preset {
  name: string;
  filters: Record<string, string>;
  rollouts: number;
}
