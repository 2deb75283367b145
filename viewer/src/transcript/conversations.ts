/** The conversations of a rollout besides the one in view: sub-agents with their callers, and refused requests. */

import type { RolloutAnswer, Session } from "../api/answers";
import { type DrawnTree, type TreeRow, leafFor, pathTo } from "../rollout/turntree";
import { argumentFields } from "./toolcalls";

export interface Drawn {
  session: Session;
  tree: DrawnTree;
}

export interface Conversation {
  drawn: Drawn;
  first: TreeRow;
  leaf: TreeRow;
  turns: number;
  about: string; // its request
  caller: string | null; // the turn whose reply called it
}

export interface Refusal {
  status: string;
  reason: string;
  at_ns: number;
  session: string;
}

const MATCHED = 16; // characters of a prompt that are enough to exclude a chance match
const SHOWN = 160;

function askedOf(row: TreeRow): string {
  return (row.turn.new_messages.findLast((message) => message.role === "user")?.text ?? "").trim();
}

/** The turn that called a conversation: an argument of its call is the conversation's request; else by the tree. */
function callerOf(first: TreeRow, drawn: Drawn[]): string | null {
  const asked = askedOf(first);
  for (const { tree } of drawn) {
    for (const row of tree.rows) {
      if (row === first) continue;
      const texts = (row.turn.reply?.tool_calls ?? []).flatMap((call) => Object.values(argumentFields(call) ?? {}));
      if (texts.some((text) => typeof text === "string" && text.trim().length >= MATCHED && asked.includes(text.trim()))) return row.turn.id;
    }
  }
  return first.fork?.parent ?? null;
}

/** Sub-agents of a rollout: separate conversations in a session, and sessions after the first. */
export function subAgents(drawn: Drawn[]): Conversation[] {
  const main = drawn.find(({ tree }) => tree.rows.length);
  return drawn.flatMap((one) =>
    one.tree.rows
      .filter((row) => row.before === null && !row.turn.auxiliary && (row.fork?.cause === "sub_agent" || (one !== main && row.row === 0)))
      .map((first) => {
        const leaf = leafFor(one.tree, first.turn.id) ?? first;
        const about = askedOf(first).replace(/\s+/g, " ").slice(0, SHOWN);
        return { drawn: one, first, leaf, turns: pathTo(leaf).length, about, caller: callerOf(first, drawn) };
      }),
  );
}

/** Refused requests by the previous turn; "" for those before the first. */
export function refusalsByTurn(rollout: RolloutAnswer, turns: TreeRow[]): Map<string, Refusal[]> {
  const found = new Map<string, Refusal[]>();
  const sessions = new Set(rollout.sessions.map((session) => session.id));
  const own = turns[0]?.turn.id.split(".").slice(0, -1).join(".");
  for (const event of rollout.events) {
    if (event["kind"] !== "refusal") continue;
    const data = event["data"] as Record<string, unknown>;
    const session = String(data["session"] ?? "");
    if (sessions.has(session) && own !== session) continue;
    const at = Number(event["at_ns"] ?? 0);
    const after = turns.findLast((row) => (row.turn.started_ns ?? 0) <= at);
    const key = after?.turn.id ?? "";
    found.set(key, [...(found.get(key) ?? []), { status: String(data["status"]), reason: String(data["reason"]), at_ns: at, session }]);
  }
  return found;
}
