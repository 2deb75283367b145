/** Attempts at one task side by side: a cell spans the attempts that are equal up to it. */

import type { GroupAnswer, Message } from "../api/answers";
import { float } from "../format";

export type Attempt = GroupAnswer["rollouts"][number];

export interface Cell {
  message: Message;
  depth: number;
  first: number; // columns [first, first + span)
  span: number;
  dim: number; // characters at its beginning that it shares with the best of its siblings
  parts: boolean; // the attempts diverge here
  reward: number | null; // mean of the attempts in this cell
  by: number; // its difference from the mean of all attempts that reach this point
}

export interface Alignment {
  columns: Attempt[]; // best first; those with the longest common beginning are neighbors
  cells: Cell[];
  depth: number;
  agreed: number; // number of messages that all attempts share
  alone: boolean[]; // for each column: whether it ever continues alone
}

interface Node {
  message: Message | null;
  attempts: Attempt[];
  children: Node[];
}

export function keyOf(message: Message): string {
  if (message.key) return `${message.after ?? ""}${message.key}`;
  return JSON.stringify([message.role, message.text, message.reasoning ?? null, message.tool_calls ?? null]);
}

function rewardOf(attempt: Attempt): number {
  const reward = float(attempt.reward);
  return reward === null || Number.isNaN(reward) ? Number.NEGATIVE_INFINITY : reward;
}

/** The length of the common beginning of two texts. */
export function alike(a: string, b: string): number {
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at += 1;
  return at;
}

/** The length of the common beginning of a message and its neighbor; 0 if their thinking differs. */
function shared(message: Message, other: Message | undefined): number {
  if (!other || other.role !== message.role || (other.reasoning ?? "") !== (message.reasoning ?? "")) return 0;
  return alike(message.text, other.text);
}

function meanReward(attempts: Attempt[]): number | null {
  const known = attempts.map(rewardOf).filter(Number.isFinite);
  return known.length ? known.reduce((sum, reward) => sum + reward, 0) / known.length : null;
}

export function align(attempts: Attempt[]): Alignment {
  const best = [...attempts].sort((a, b) => rewardOf(b) - rewardOf(a) || a.attempt - b.attempt);
  const columns: Attempt[] = [];
  const cells: Cell[] = [];
  let depth = 0;

  // Depth first with an explicit stack, since conversations may be long.
  const open: { node: Node; depth: number }[] = [{ node: { message: null, attempts: best, children: [] }, depth: 0 }];
  while (open.length) {
    const { node, depth: at } = open.pop() as { node: Node; depth: number };
    const ended = node.attempts.filter((attempt) => attempt.messages.length <= at);
    columns.push(...ended);
    const byKey = new Map<string, Node>();
    for (const attempt of node.attempts) {
      const message = attempt.messages[at];
      if (!message) continue;
      const key = keyOf(message);
      const child = byKey.get(key) ?? { message, attempts: [], children: [] };
      child.attempts.push(attempt);
      byKey.set(key, child);
    }
    const children = [...byKey.values()];
    let first = columns.length;
    for (const [index, child] of children.entries()) {
      if (!child.message) continue;
      const other = children[index === 0 ? 1 : 0]?.message ?? undefined;
      const reward = meanReward(child.attempts);
      const before = meanReward(node.attempts);
      cells.push({
        message: child.message, depth: at, first, span: child.attempts.length, dim: shared(child.message, other),
        parts: node.attempts.length > child.attempts.length, reward, by: reward === null || before === null ? 0 : reward - before,
      });
      first += child.attempts.length;
      depth = Math.max(depth, at + 1);
    }
    for (const child of children.reverse()) open.push({ node: child, depth: at + 1 });
  }
  const agreed = cells.filter((cell) => cell.span === attempts.length).length;
  const alone = columns.map((_, index) => cells.some((cell) => cell.span === 1 && cell.first === index));
  return { columns, cells, depth, alone, agreed: attempts.length > 1 ? agreed : 0 };
}
