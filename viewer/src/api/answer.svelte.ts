/** One answer that a view shows: loading, loaded or failed. It is reloaded when its path or the run changes, or by a timer. */

import { AnswerError, json } from "./client";
import { live, tell } from "./live.svelte";

export class Answer<T> {
  data = $state.raw<T | null>(null);
  error = $state.raw<AnswerError | null>(null);
  stale = $state(false); // a newer one is being loaded

  constructor(path: () => string | null, options: { followLive?: boolean; everyMs?: number; get?: (path: string, signal: AbortSignal) => Promise<T> } = {}) {
    const get = options.get ?? ((at: string, signal: AbortSignal) => json<T>(at, signal));
    let shown: string | null = null;
    let ticks = $state(0);
    $effect(() => () => tell(this, null));
    $effect(() => {
      if (options.everyMs === undefined) return;
      const timer = setInterval(() => document.visibilityState === "visible" && (ticks += 1), options.everyMs);
      return () => clearInterval(timer);
    });
    $effect(() => {
      const at = path();
      void ticks;
      void live.attempts;
      if (options.followLive) void live.revision;
      if (at === null) return;
      const bare = at.split("?")[0] ?? at;
      if (shown !== bare) this.data = null;
      shown = bare;
      this.stale = true;
      const control = new AbortController();
      get(at, control.signal).then(
        (data) => {
          if (control.signal.aborted) return;
          this.data = data;
          this.error = null;
          tell(this, null);
          this.stale = false;
        },
        (error: unknown) => {
          if (control.signal.aborted) return;
          this.error = error instanceof AnswerError ? error : new AnswerError(String(error), 0);
          this.stale = false;
          if (this.data !== null) tell(this, this.error.message);
        },
      );
      return () => control.abort();
    });
  }
}
