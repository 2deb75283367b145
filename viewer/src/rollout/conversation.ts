/** The messages of a branch, each with its turn. */

import type { Message } from "../api/answers";
import { type TreeRow, type DrawnTree, pathTo } from "./turntree";

export interface TurnLines {
  row: TreeRow;
  again: Message[]; // sent again after a fork: the reader has already seen them there
  changed: number; // number of these that changed
  lines: Message[]; // the new messages and the reply
}

function same(a: Message, b: Message): boolean {
  return a.key && b.key ? a.key === b.key : a.text === b.text && a.role === b.role;
}

/** A turn's whole conversation, its reply included. */
function wholeOf(tree: DrawnTree, row: TreeRow): Message[] {
  const chain: TreeRow[] = [];
  for (let at: TreeRow | undefined = row; at; at = tree.byTurn.get(at.turn.parent ?? "")) chain.push(at);
  let whole: Message[] = [];
  for (const { turn } of chain.reverse()) {
    whole = [...whole.slice(0, turn.kept_messages ?? whole.length), ...turn.new_messages, ...(turn.reply ? [turn.reply] : [])];
  }
  return whole;
}

/** By turn, so that a transcript can show where each prompt began. */
export function conversationOf(tree: DrawnTree, leaf: TreeRow | null): TurnLines[] {
  const blocks: TurnLines[] = [];
  let read: Message[] = [];
  for (const row of pathTo(leaf)) {
    const { turn } = row;
    const reply = turn.reply ? [turn.reply] : [];
    if (row.before === null || turn.parent === row.before.turn.id) {
      read = [...(row.before === null ? [] : read.slice(0, turn.kept_messages ?? read.length)), ...turn.new_messages, ...reply];
      blocks.push({ row, again: [], changed: 0, lines: [...turn.new_messages, ...reply] });
      continue;
    }
    const whole = wholeOf(tree, row);
    const start = whole.length - reply.length - turn.new_messages.length;
    let repeated = 0, changed = 0;
    for (const message of turn.new_messages) {
      const known = read[start + repeated];
      if (!known || known.role !== message.role || (!same(known, message) && message.role !== "assistant")) break;
      if (!same(known, message)) changed += 1;
      repeated += 1;
    }
    blocks.push({ row, again: turn.new_messages.slice(0, repeated), changed, lines: [...turn.new_messages.slice(repeated), ...reply] });
    read = whole;
  }
  return blocks;
}
