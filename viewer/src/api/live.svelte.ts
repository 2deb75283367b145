/** Changes of the shown run from the server's events, and whether the server answers. */

import { served } from "./base";
import { isStatic } from "./embedded";

const AGAIN_MS = 3000;
const state = $state({ revision: 0, attempts: 0, open: false, lost: false, trouble: "" });
const troubles = new Map<object, string>();
let source: EventSource | null = null;
let following: string | null = null;
let seen: number | null = null; // the snapshot of the last event; null before the first event
let oldest: number | null = null; // the oldest snapshot of the answers before the first event

export const live = {
  /** Grows with each change of the followed run. */
  get revision(): number {
    return state.revision;
  },
  /** Grows when everything must be reloaded: the server is back, or the reader requests it. */
  get attempts(): number {
    return state.attempts;
  },
  get open(): boolean {
    return state.open;
  },
  /** Whether the server does not answer any more. */
  get lost(): boolean {
    return state.lost;
  },
};

/** Why the shown answers could not be updated; "" if they could. */
export function trouble(): string {
  return state.trouble;
}

/** Report why an answer could not be updated; null if it could, or if it is no longer shown. */
export function tell(answer: object, why: string | null): void {
  if (why === null) troubles.delete(answer);
  else troubles.set(answer, why);
  state.trouble = [...troubles.values()].at(-1) ?? "";
}

export function tryAgain(): void {
  state.attempts += 1;
}

/** Call before a request. The returned function takes the snapshot of the answer, or null if it has none.
 *
 * No event reports changes between the making of an answer and the first event. So an answer that is older than the
 * first event is reloaded. */
export function noteRequest(path: string): (snapshot: number | null) => void {
  const [run, heard] = [following, seen];
  return (snapshot) => {
    if (following === null || !path.startsWith(`/api/${encodeURIComponent(following)}/`)) return;
    if (seen === null) oldest = Math.min(oldest ?? Infinity, snapshot ?? -1);
    else if ((heard === null || run !== following) && (snapshot ?? -1) < seen) state.revision += 1;
  };
}

export function followRun(r: string | null): void {
  if (isStatic || r === following) return;
  following = r;
  seen = oldest = null;
  state.lost = false;
  listen();
}

// A browser has six connections to a server for all its tabs, so a hidden tab must not keep one open.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) seen ??= -1; // changes before the tab was first shown are new
  listen();
});

function listen(): void {
  source?.close();
  source = null;
  state.open = false;
  if (following === null || document.hidden) return;
  const mine = new EventSource(served(`/api/${encodeURIComponent(following)}/live`));
  source = mine;
  let heard = false;
  mine.onopen = () => {
    if (state.lost) tryAgain();
    heard = state.open = true;
    state.lost = false;
  };
  mine.onerror = () => {
    state.open = false;
    state.lost ||= heard;
    // The browser retries a refused connection, but gives up after an error answer.
    if (mine.readyState === EventSource.CLOSED && state.lost) setTimeout(() => mine === source && listen(), AGAIN_MS);
  };
  mine.onmessage = (event: MessageEvent<string>) => {
    const { snapshot, rollouts } = JSON.parse(event.data) as { snapshot?: number; rollouts?: string[] };
    const before = seen ?? oldest;
    const changed = Boolean(rollouts?.length) || (before !== null && snapshot !== undefined && snapshot !== before);
    seen = snapshot ?? seen;
    if (changed) state.revision += 1;
  };
}
