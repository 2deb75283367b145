/** Two conversations side by side: common messages are drawn once, different ones beside each other. */

import type { Message } from "../api/answers";
import { keyOf } from "../group/align";
import { pretty } from "../rollout/pretty";
import { common } from "./sequence";
import { type Sides, textSides } from "./text";

export interface DiffRow {
  a: Message | null;
  b: Message | null;
  shared: boolean; // common to both: `a` is drawn once
}

/** The kind of a message, so that replies to the same question are compared. */
function kindOf(message: Message): string {
  return `${message.role} ${message.name ?? ""}`;
}

/** The messages between two common ones: those of the same kind are put side by side, in order. */
function beside(a: Message[], b: Message[]): DiffRow[] {
  const rows: DiffRow[] = [];
  let [i, j] = [0, 0];
  for (const [x, y] of [...common(a.map(kindOf), b.map(kindOf)), [a.length, b.length] as const]) {
    while (i < x) rows.push({ a: a[i++] as Message, b: null, shared: false });
    while (j < y) rows.push({ a: null, b: b[j++] as Message, shared: false });
    if (x < a.length) rows.push({ a: a[i++] as Message, b: b[j++] as Message, shared: false });
  }
  return rows;
}

export function diffRows(a: Message[], b: Message[]): DiffRow[] {
  const rows: DiffRow[] = [];
  let [i, j] = [0, 0];
  for (const [x, y] of [...common(a.map(keyOf), b.map(keyOf)), [a.length, b.length] as const]) {
    rows.push(...beside(a.slice(i, x), b.slice(j, y)));
    if (x < a.length) rows.push({ a: a[x] as Message, b: b[y] as Message, shared: true });
    [i, j] = [x + 1, y + 1];
  }
  return rows;
}

export interface DiffPart {
  kind: "thinking" | "text" | "call";
  names: [string, string]; // of called tools; empty for other parts
  sides: Sides;
}

/** The parts of two messages, each compared with its counterpart. */
export function diffParts(a: Message, b: Message): DiffPart[] {
  const parts: DiffPart[] = [];
  const thought: [string, string] = [a.reasoning ?? "", b.reasoning ?? ""];
  if (thought[0] || thought[1]) parts.push({ kind: "thinking", names: ["", ""], sides: textSides(...thought) });
  if (a.text || b.text) parts.push({ kind: "text", names: ["", ""], sides: textSides(a.text, b.text) });
  const [calls, others] = [a.tool_calls ?? [], b.tool_calls ?? []];
  for (let at = 0; at < Math.max(calls.length, others.length); at++) {
    const [one, other] = [calls[at], others[at]];
    parts.push({
      kind: "call",
      names: [one?.name ?? "", other?.name ?? ""],
      sides: textSides(one ? pretty(one.arguments) : "", other ? pretty(other.arguments) : ""),
    });
  }
  return parts;
}
