/** Rewards over time in stretches that hold enough of them to have a mean. */

import type { Num, Overview, Spread } from "../api/answers";
import { float } from "../format";

export interface Point {
  x: number;
  rollouts: number; // with a reward
  reward: Spread | null;
}

const MOST_POINTS = 16;
const FEWEST = 4; // rewards in a stretch

type Stretch = NonNullable<Overview["by_time"]>[number];

function joined(stretches: Stretch[]): { rollouts: number; reward: Spread | null } {
  const told = stretches.filter((one) => one.reward !== null);
  if (told.length === 1 && told[0]) return { rollouts: told[0].rollouts, reward: told[0].reward };
  let n = 0, total = 0, squares = 0, min = Infinity, max = -Infinity;
  for (const { rollouts, reward } of told) {
    const mean = float(reward?.mean) ?? 0, std = float(reward?.std) ?? 0;
    n += rollouts;
    total += mean * rollouts;
    squares += (std * std + mean * mean) * rollouts;
    min = Math.min(min, float(reward?.min) ?? Infinity);
    max = Math.max(max, float(reward?.max) ?? -Infinity);
  }
  if (n === 0) return { rollouts: 0, reward: null };
  const mean = total / n;
  const quantiles: Num[] = []; // those of a whole are not to be had from those of its parts
  return { rollouts: n, reward: { mean, std: Math.sqrt(Math.max(0, squares / n - mean * mean)), min, max, quantiles } };
}

/** Neighboring stretches joined until each has enough rewards; x in nanoseconds since the first. */
export function overTime(stretches: Stretch[]): Point[] {
  const began = stretches[0]?.at_ns ?? 0;
  const all = stretches.reduce((sum, one) => sum + one.rollouts, 0);
  const enough = Math.max(FEWEST, Math.ceil(all / MOST_POINTS));
  const parts: Stretch[][] = [];
  let held = 0;
  for (const one of stretches) {
    if (parts.length === 0 || held >= enough) {
      parts.push([]);
      held = 0;
    }
    parts.at(-1)?.push(one);
    held += one.rollouts;
  }
  // What is left over at the end goes with what came before it.
  if (held < enough && parts.length > 1) parts.at(-2)?.push(...(parts.pop() ?? []));
  return parts.map((part) => ({ x: ((part[0]?.at_ns ?? began) + (part.at(-1)?.at_ns ?? began)) / 2 - began, ...joined(part) }));
}
