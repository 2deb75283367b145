/** The closed lists of a tape, in words that a person reads. An unknown one shows as it came. */

export const STATUS: Record<string, string> = {
  running: "has not ended",
  finished: "an outcome that its environment rewards",
  failed: "the infrastructure broke it; it has no reward and averages leave it out",
  lost: "its writer died without a finish",
};

export const FATE: Record<string, string> = {
  trained: "carries loss",
  "loss:masked_high": "the loss leaves it out: the trainer finds it far likelier than the engine did",
  "loss:masked_low": "the loss leaves it out: the trainer finds it far less likely than the engine did",
  "loss:masked": "the loss leaves it out",
  "masked:abandoned": "delivered, then thrown away by the agent",
  "masked:aborted": "cut short, and never continued",
  "masked:engine_error": "the engine failed in it",
  "masked:undelivered": "the client did not get it, or nobody knows",
  "masked:no_logprob": "the engine gave no logprob",
  "masked:stale": "sampled by weights older than the limit",
  "masked:given_up": "after the place where the next prompt departs",
  "masked:replaced": "the slime policy wipes the whole reply that drifted",
  "masked:rewritten": "the slime policy: its message came back changed",
  "masked:lost_claim": "the slime policy: its first branch gave it up",
  "dropped:auxiliary": "an auxiliary call, such as a title",
  "dropped:branch": "on a branch that was not chosen",
  "dropped:length": "beyond the maximum sample length",
  "dropped:rollout_failed": "its rollout failed",
  "dropped:running": "its rollout has not ended",
  "dropped:pruned": "no longer on the tape",
  "dropped:filtered": "its rollout is kept out of training",
  "dropped:not_token_faithful": "the engine gave text, and no ids of its own",
  "dropped:empty_prompt": "its prompt is empty",
};

export const CAUSE: Record<string, string> = {
  sub_agent: "another conversation beside the first",
  compaction: "history replaced by something shorter",
  retry: "the same prompt sampled again",
  abandoned_reply: "goes on without the reply it was given",
  reply_whitespace: "a reply came back with other white space",
  thinking_stripped: "a reply came back without its thinking",
  reply_rewritten: "a reply came back changed",
  retokenized: "equal messages, other tokens",
  tools_changed: "equal messages under other tools or template options",
  history_edited: "a message that the model did not write was changed",
};

export const FLAG: Record<string, string> = {
  missing_stop_id: "ended by a stop token that is not among its ids",
  repaired_unicode: "text that was not valid Unicode was replaced",
  special_token_text: "user or tool text spells a special token",
  malformed_call: "a tool call that could not be parsed was delivered as text",
  denied_tool: "a call of a tool that the session may not use was delivered as text",
  not_token_faithful: "the engine gave text, and ids were not its own",
  nan_logprob: "the engine gave NaN, which is recorded as no logprob",
};

export function plain(word: string | null | undefined): string {
  return (word ?? "").replaceAll("_", " ").replace(":", ": ");
}

/** trained, masked or dropped: the part of a fate that says whether it trains. */
export function fateFamily(fate: string): "trained" | "masked" | "dropped" {
  return fate.startsWith("masked") ? "masked" : fate.startsWith("dropped") ? "dropped" : "trained";
}

export const POLICIES = ["exact", "keep-head", "slime"] as const;
