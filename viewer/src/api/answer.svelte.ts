/** One answer that a view shows: loading, there, or failed; asked again when its path or the run changes. */

import { AnswerError, json } from "./client";
import { live } from "./live.svelte";

export class Answer<T> {
  data = $state.raw<T | null>(null);
  error = $state.raw<AnswerError | null>(null);
  stale = $state(false); // a newer one is on its way

  constructor(path: () => string | null, options: { followLive?: boolean; get?: (path: string, signal: AbortSignal) => Promise<T> } = {}) {
    const get = options.get ?? ((at: string, signal: AbortSignal) => json<T>(at, signal));
    let shown: string | null = null;
    $effect(() => {
      const at = path();
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
          this.stale = false;
        },
        (error: unknown) => {
          if (control.signal.aborted) return;
          this.error = error instanceof AnswerError ? error : new AnswerError(String(error), 0);
          this.stale = false;
        },
      );
      return () => control.abort();
    });
  }
}
