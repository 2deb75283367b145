/** Terms, statuses, fates, fork causes and flags in plain words. Unknown ones are shown unchanged. */

/** The definitions for newcomers, shown at terms and in the help. */
export const TERMS = {
  run: "One recorded experiment: a directory.",
  step: "The training step, or policy iteration, that a rollout was made for.",
  task: "Something to attempt, such as a question, a game or an issue to fix.",
  rollout: "One attempt at one task at one step, with everything that was said, sampled and rewarded in it.",
  attempt: "The number of a rollout within its group: 0, 1, and so on.",
  try: "The same rollout run again, for example after the machine broke: 0, 1, and so on.",
  group: "The rollouts of one task at one step. Advantages compare them with each other.",
  reward: "The number that a rollout was given for how it ended. A rollout that the infrastructure broke has none.",
  "reward term": "One of the numbers that a reward was computed from.",
  spread: "The standard deviation of rewards. In a group without spread no attempt is better than another, so it teaches nothing.",
  session: "One agent's connection to the gateway. A sub-agent may have its own.",
  turn: "One reply of the model, with the prompt that it was sampled from.",
  segment: "A part of a reply that one weight version sampled.",
  fork: "A place where a conversation departs from an earlier one, so that its prompt does not extend the ids before it.",
  "fork cause": "Why a conversation departs from an earlier one: a retry, a compaction, a sub-agent, a rewritten reply, and others.",
  branch: "A path through the turns of a session, from its first prompt to a turn that nothing continues.",
  "cut policy": "The rules by which turns become samples: exact, keep-head or slime.",
  sample: "One training row: the ids of turns that continue each other, and which of them train.",
  ledger: "Where every sampled token goes: it is trained, masked for a stated reason, or dropped for a stated reason.",
  fate: "What becomes of a sampled token: trained, masked or dropped, and why.",
  trained: "The token carries loss, because a trainer learns from it under this cut policy.",
  masked: "The token is part of a sample, but carries no loss.",
  dropped: "The token is part of no sample.",
  "sampled token": "A token that the model produced, unlike those of prompts and tool results.",
  credit: "The numbers that a sample carries: its share of the reward, its advantage and its loss weight.",
  advantage: "How much better an attempt was than its group, which is what its tokens are reinforced by.",
  "loss weight": "How much a sample counts in the loss, among those of its rollout.",
  logprob: "The natural logarithm of the probability with which the engine sampled a token. 0 is certain, -2.3 is one in ten.",
  probability: "The chance with which the engine sampled a token.",
  entropy: "How undecided the model was at a token, in nats. 0 is certain, 0.69 is a coin toss.",
  ratio: "The trainer's probability of a token, divided by the engine's. 1 means that both agree.",
  "mismatch KL": "How far trainer and engine disagree about a token: ratio - log ratio - 1. 0 means that they agree.",
  "weight version": "Which weights sampled a token.",
  staleness: "How many weight versions a rollout is behind the newest that was announced when it began.",
  "token record": "One sequence as the trainer saw it, with its values for every token.",
  "pass@1": "The chance that one attempt solves a task, as a mean over tasks.",
  "pass@k": "The chance that at least one of k attempts solves a task, as a mean over tasks.",
  "standard error": "How far the mean would typically move if the rollouts were drawn again.",
  status: "The state of a rollout: running, finished, failed (the infrastructure broke it), or lost (its writer died).",
  "stop reason": "Why a finished rollout ended: it was completed, ran out of turns, tokens or time, and others.",
  environment: "What gives the tasks, answers the agent and rewards it.",
  agent: "The program that talks to the model: a chat loop, a coding agent, and others.",
  trace: "The readable record of a rollout.",
  index: "A database of what the run holds, made from the tape. The page reads it, and it may be behind while a large run is opened.",
} as const;

export type TermName = keyof typeof TERMS;

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

/** A word of Rolltape's own, such as a status or a cause, as a reader wants it. Names that users give stay as they are. */
export function plain(word: string | null | undefined): string {
  return (word ?? "").replaceAll("_", " ").replace(":", ": ");
}

/** The first part of a fate: trained, masked or dropped. */
export function fateFamily(fate: string): "trained" | "masked" | "dropped" {
  return fate.startsWith("masked") ? "masked" : fate.startsWith("dropped") ? "dropped" : "trained";
}

export const POLICIES = ["exact", "keep-head", "slime"] as const;

export const UNGRADED = "ungraded: ";

/** Why a rollout is kept out of training, in a word: nobody could grade it, or somebody filtered it. */
export function filterName(filter: string): string {
  return filter.startsWith(UNGRADED) ? "ungraded" : "filtered";
}
