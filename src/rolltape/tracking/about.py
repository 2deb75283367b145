"""A trace → what is said about it beside its messages."""

from typing import Any

from rolltape.records.trace import Trace

Fields = dict[str, Any]


def about(trace: Trace, split: str) -> Fields:
    """Where a trace belongs, how it ended, and how long it is; what is not known of it is left out."""
    fields = {
        "split": split,
        "step": trace.step,
        "reward": trace.total_reward,
        "reward_terms": trace.reward_terms,
        "status": trace.status,
        "stop_reason": trace.stop_reason,
        "reason": trace.reason,
        "filtered": trace.filtered,
        "task_id": trace.task_id,
        "attempt": trace.attempt,
        "turns": sum(step.policy_response is not None for step in trace.steps),
        **_lengths(trace),
        "first_version": trace.versions[0] if trace.versions else None,
        "last_version": trace.versions[-1] if trace.versions else None,
        "versions": list(trace.versions) if len(trace.versions) > 2 else None,
        "model": trace.model,
        "agent": trace.agent,
        "source": trace.source,
        "tags": list(trace.tags),
        "pruned": list(trace.pruned),
        "reward_data": trace.reward_data,
        "env_state": trace.env_state,
        "metrics": trace.metrics,
        "extra": trace.extra,
        "rollout": trace.rollout,
        "try": trace.try_index,
        "group": trace.group,
        "run": trace.run,
    }
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {})}


def _lengths(trace: Trace) -> Fields:
    """The tokens before the first reply, those of all replies, and the longest prompt with its reply."""
    known = [(step.prompt_tokens, step.sampled_tokens or 0) for step in trace.steps if step.prompt_tokens is not None]
    if not known:
        return {}
    return {
        "prompt_tokens": known[0][0],
        "sampled_tokens": sum(sampled for _, sampled in known),
        "tokens": max((prompt or 0) + sampled for prompt, sampled in known),
    }
