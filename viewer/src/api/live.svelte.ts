/** What the server says while a run is being recorded. */

import { isStatic } from "./embedded";

const state = $state({ revision: 0, open: false });
let source: EventSource | null = null;
let following: string | null = null;

export const live = {
  /** Grows whenever something of the run that is followed has changed. */
  get revision(): number {
    return state.revision;
  },
  get open(): boolean {
    return state.open;
  },
};

export function followRun(r: string | null): void {
  if (isStatic || r === following) return;
  source?.close();
  source = null;
  following = r;
  state.open = false;
  if (r === null) return;
  source = new EventSource(`/api/${encodeURIComponent(r)}/live`);
  source.onopen = () => (state.open = true);
  source.onerror = () => (state.open = false);
  let seen: number | null = null;
  source.onmessage = (event: MessageEvent<string>) => {
    const said = JSON.parse(event.data) as { snapshot?: number; rollouts?: string[] };
    const changed = Boolean(said.rollouts?.length) || (seen !== null && said.snapshot !== undefined && said.snapshot !== seen);
    seen = said.snapshot ?? seen;
    if (changed) state.revision += 1;
  };
}
