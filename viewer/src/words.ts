/** Statuses, fates, fork causes and flags in plain words. An unknown one is shown as it came. */

export const STATUS: Record<string, string> = {
  running: "has not ended",
  finished: "ended with an outcome that is rewarded",
  failed: "broken by the infrastructure; it has no reward and is left out of averages",
  lost: "its writer died without a finish",
};

export const FATE: Record<string, string> = {
  trained: "carries loss",
  "loss:masked_high": "left out by the loss: far more likely under the trainer than under the engine",
  "loss:masked_low": "left out by the loss: far less likely under the trainer than under the engine",
  "loss:masked": "left out by the loss",
  "masked:abandoned": "delivered, then discarded by the agent",
  "masked:aborted": "cut short, and never continued",
  "masked:engine_error": "the engine failed in it",
  "masked:undelivered": "the client did not receive it, or it is not known whether it did",
  "masked:no_logprob": "the engine returned no logprob",
  "masked:stale": "sampled by weights older than the limit",
  "masked:constrained": "sampled under a grammar, a schema or a list of choices",
  "masked:rewritten_after": "after the first token at which the next prompt differs",
  "masked:replaced": "slime policy: the whole reply is masked because its tokens drifted",
  "masked:rewritten": "slime policy: its message came back changed",
  "masked:trained_in_other_sample": "slime policy: another branch claimed it first",
  "dropped:auxiliary": "an auxiliary call, such as a title",
  "dropped:branch": "on a branch that was not chosen",
  "dropped:length": "beyond the maximum sample length",
  "dropped:rollout_failed": "its rollout failed",
  "dropped:running": "its rollout has not ended",
  "dropped:pruned": "no longer on the tape",
  "dropped:filtered": "its rollout is filtered out of training",
  "dropped:not_token_faithful": "the engine returned text without token ids",
  "dropped:empty_prompt": "its prompt is empty",
};

export const CAUSE: Record<string, string> = {
  sub_agent: "another conversation beside the first",
  compaction: "history replaced by something shorter, or the request for the summary",
  retry: "the same prompt sampled again",
  sibling: "the same prompt sampled beside another reply to it",
  abandoned_reply: "continues without the reply that was given",
  reply_whitespace: "a reply came back with different white space",
  thinking_stripped: "a reply came back without its thinking, or the template left it out",
  reply_rewritten: "a reply came back changed",
  retokenized: "same messages, different tokens",
  tools_changed: "same conversation, different tools or template options",
  history_edited: "a message that the model did not write was changed",
};

export const FLAG: Record<string, string> = {
  missing_stop_id: "ended by a stop token that is not among its ids",
  repaired_unicode: "text that was not valid Unicode was replaced",
  special_token_text: "user or tool text spells a special token",
  implausible: "no engine can have sampled this; the turn's error says why",
  unmet_demand: "the reply lacks the required call, or does not follow the requested schema",
  constrained: "a grammar, a schema or a list of choices limited what could be sampled",
  malformed_call: "a tool call that could not be parsed was delivered as text",
  denied_tool: "a call of a tool that the session may not use was delivered as text",
  not_token_faithful: "the engine returned text without token ids",
  media_left_out: "images or documents in the prompt are placeholders; the model reads text only",
  nan_logprob: "the engine returned NaN, recorded as no logprob",
};

export function plain(word: string | null | undefined): string {
  return (word ?? "").replaceAll("_", " ").replace(":", ": ");
}

/** The first part of a fate: trained, masked or dropped. */
export function fateFamily(fate: string): "trained" | "masked" | "dropped" {
  return fate.startsWith("masked") ? "masked" : fate.startsWith("dropped") ? "dropped" : "trained";
}

export const POLICIES = ["exact", "keep-head", "slime"] as const;
