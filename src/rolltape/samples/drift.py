"""How a prompt relates to the tokens held so far, and whether a sample goes on over the place where it departs."""

import enum
from typing import NamedTuple

from rolltape.records.policy import CutPolicy, OnRewrite
from rolltape.records.turn import Turn


class Continuation(enum.StrEnum):
    """Where the next prompt departs from what is held."""

    EXTENDS = "extends"  # nowhere
    REWRITES_LAST_REPLY = "rewrites_last_reply"  # inside the most recent reply, or short of its end
    REWRITES_HISTORY = "rewrites_history"  # anywhere earlier, the glue of the generation prompt included


class Step(NamedTuple):
    """From one turn to the next on a branch: how many tokens stay, and what that means."""

    kept: int
    continuation: Continuation
    same_sample: bool
    replaces_reply: bool  # the earlier reply stops training as a whole


def step_between(held: Turn, following: Turn, policy: CutPolicy) -> Step:
    """Compare a prompt with the turn before it and decide by the policy whether the sample goes on."""
    kept = held.tokens.common_prefix(following.prompt_tokens)
    if kept == len(held.tokens):
        return Step(kept, Continuation.EXTENDS, True, False)
    if kept < len(held.prompt_tokens):
        return Step(kept, Continuation.REWRITES_HISTORY, False, False)
    if policy.on_rewrite is OnRewrite.KEEP_HEAD:
        goes_on = len(held.tokens) - kept <= policy.max_given_up_tokens
        return Step(kept, Continuation.REWRITES_LAST_REPLY, goes_on, False)
    if policy.on_rewrite is OnRewrite.REPLACE_REPLY:
        goes_on = len(following.sampled_ids) < policy.max_reply_tokens
        return Step(kept, Continuation.REWRITES_LAST_REPLY, goes_on, goes_on)
    return Step(kept, Continuation.REWRITES_LAST_REPLY, False, False)
