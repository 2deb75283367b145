/** The rights of this browser: to annotate, to share, or only to see a rollout that was shared with it. */

import { json } from "../api/client";
import { isStatic } from "../api/embedded";

interface Session {
  annotate: { author: string; read_only: Record<string, string> } | null;
  may_share: boolean;
  shared: { r: string; rollout: string; expires_s: number }[]; // empty if it may see everything
}

const NOTHING: Session = { annotate: null, may_share: false, shared: [] };
const KEPT = "rolltape-author";
const state = $state<{ session: Session; author: string }>({ session: NOTHING, author: localStorage.getItem(KEPT) ?? "" });

if (!isStatic) {
  json<Session>("/api/session").then(
    (found) => (state.session = found),
    () => undefined, // the view's own answer reports the error
  );
}

export const session = {
  get mayShare(): boolean {
    return state.session.may_share;
  },
  /** The only rollout that this browser may see, or null if it may see everything. */
  get shared(): { r: string; rollout: string; expires_s: number } | null {
    return state.session.shared[0] ?? null;
  },
  get author(): string {
    return state.author || (state.session.annotate?.author ?? "");
  },
  set author(name: string) {
    state.author = name.trim();
    localStorage.setItem(KEPT, state.author);
  },
};

/** Whether tags and notes of a run can be written here. */
export function mayAnnotate(r: string): boolean {
  return state.session.annotate !== null && !(r in state.session.annotate.read_only);
}

/** Why a run cannot be annotated although the reader has the right, or null. */
export function readOnly(r: string): string | null {
  return state.session.annotate?.read_only[r] ?? null;
}
