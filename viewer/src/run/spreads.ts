/** Rewards over time in intervals with enough rewards for a mean. */

import type { Num, Overview, Spread } from "../api/answers";
import { float } from "../format";

export interface Point {
  x: number;
  reward: Spread | null;
}

const MOST_POINTS = 16;
const FEWEST = 4; // rewards in an interval

type Interval = Overview["by_time"][number];

function joined(intervals: Interval[]): Spread {
  if (intervals.length === 1 && intervals[0]) return intervals[0].reward;
  let rollouts = 0, total = 0, squares = 0, min = Infinity, max = -Infinity;
  for (const { reward } of intervals) {
    const mean = float(reward.mean) ?? 0, std = float(reward.std) ?? 0;
    rollouts += reward.rollouts;
    total += mean * reward.rollouts;
    squares += (std * std + mean * mean) * reward.rollouts;
    min = Math.min(min, float(reward.min) ?? Infinity);
    max = Math.max(max, float(reward.max) ?? -Infinity);
  }
  const mean = total / rollouts;
  const quantiles: Num[] = []; // quantiles of a whole cannot be computed from those of its parts
  return { rollouts, mean, std: Math.sqrt(Math.max(0, squares / rollouts - mean * mean)), min, max, quantiles };
}

/** Join neighboring intervals until each has enough rewards; x is in nanoseconds since the first. */
export function overTime(intervals: Interval[]): Point[] {
  const began = intervals[0]?.at_ns ?? 0;
  const all = intervals.reduce((sum, one) => sum + one.reward.rollouts, 0);
  const enough = Math.max(FEWEST, Math.ceil(all / MOST_POINTS));
  const parts: Interval[][] = [];
  let held = 0;
  for (const one of intervals) {
    if (parts.length === 0 || held >= enough) {
      parts.push([]);
      held = 0;
    }
    parts.at(-1)?.push(one);
    held += one.reward.rollouts;
  }
  // A rest at the end is added to the interval before it.
  if (held < enough && parts.length > 1) parts.at(-2)?.push(...(parts.pop() ?? []));
  return parts.map((part) => ({ x: ((part[0]?.at_ns ?? began) + (part.at(-1)?.at_ns ?? began)) / 2 - began, reward: joined(part) }));
}
