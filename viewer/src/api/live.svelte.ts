/** What the server says while a run is being recorded, and whether it can be heard. */

import { isStatic } from "./embedded";

const AGAIN_MS = 3000;
const state = $state({ revision: 0, attempts: 0, open: false, lost: false, trouble: "" });
const troubles = new Map<object, string>();
let source: EventSource | null = null;
let following: string | null = null;
let seen: number | null = null; // the last state of the run that was heard of

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

export function followRun(r: string | null): void {
  if (isStatic || r === following) return;
  following = r;
  seen = null;
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
  const mine = new EventSource(`/api/${encodeURIComponent(following)}/live`);
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
    const said = JSON.parse(event.data) as { snapshot?: number; rollouts?: string[] };
    const changed = Boolean(said.rollouts?.length) || (seen !== null && said.snapshot !== undefined && said.snapshot !== seen);
    seen = said.snapshot ?? seen;
    if (changed) state.revision += 1;
  };
}
