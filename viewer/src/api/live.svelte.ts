/** Changes of the run that is shown, as the server sends them, and whether the server answers. */

import { served } from "./base";
import { isStatic } from "./embedded";

const AGAIN_MS = 3000;
const state = $state({ revision: 0, attempts: 0, open: false, lost: false, trouble: "" });
const troubles = new Map<object, string>();
let source: EventSource | null = null;
let following: string | null = null;
let seen: number | null = null; // the last snapshot that an event named; null: no event so far
let oldest: number | null = null; // the oldest snapshot among the answers that came before the first event

export const live = {
  /** Grows whenever something of the run that is followed has changed. */
  get revision(): number {
    return state.revision;
  },
  /** Grows when everything is to be asked again: the server is back, or the reader wants it. */
  get attempts(): number {
    return state.attempts;
  },
  get open(): boolean {
    return state.open;
  },
  /** The server was there, and is not any more. */
  get lost(): boolean {
    return state.lost;
  },
};

/** Why what is shown could not be brought up to date; "": it could. */
export function trouble(): string {
  return state.trouble;
}

/** An answer says that it could not be brought up to date, and why; null: it could, or nobody looks at it any more. */
export function tell(answer: object, why: string | null): void {
  if (why === null) troubles.delete(answer);
  else troubles.set(answer, why);
  state.trouble = [...troubles.values()].at(-1) ?? "";
}

export function tryAgain(): void {
  state.attempts += 1;
}

/** Call before a request; the function that it returns takes the snapshot of the answer, null if it names none.
 *
 * What the run records after the answer was made and before the first event is named by no event: an answer that is
 * older than the first event is asked for again. */
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

// A browser has six connections to a server for all its tabs: one that nobody looks at must not keep one busy.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) seen ??= -1; // what came before it was first looked at is news
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
    // A refused connection is tried again by the browser; after an answer that is an error it gives up.
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
