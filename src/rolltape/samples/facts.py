"""A rollout in a few lines: reward terms, lengths, where its tokens went, how long it took."""

import math
from collections import Counter
from collections.abc import Iterator

from rolltape.records.rollout import EventKind, Rollout, Status, pruned_of
from rolltape.records.wording import SHORT_ID, number, plural, span
from rolltape.samples.linearize import Linearized

_MOST_NAMED = 4


def title(rollout: Rollout) -> str:
    """A rollout in a line: what it was, and how it ended."""
    head, outcome = rollout.head, rollout.outcome
    parts = [f"rollout {head.id[:SHORT_ID]}", f"step {head.step}"]
    if head.task_id is not None:
        parts.append(f"task {head.task_id}")
    parts.append(f"attempt {head.attempt}" + (f" (try {head.try_index})" if head.try_index else ""))
    parts.append(outcome.status.value + (f" ({outcome.reason})" if outcome.reason else ""))
    if outcome.reward is not None:
        parts.append(f"reward {number(outcome.reward)}")
    return ", ".join(parts)


def fact_lines(made: Linearized) -> Iterator[str]:
    """The lines that sum up a rollout: rewards, turns, time, refusals, and where its tokens went."""
    rollout, outcome = made.rollout, made.rollout.outcome
    if outcome.reward_terms:
        yield "reward terms: " + ", ".join(f"{name} {number(value)}" for name, value in outcome.reward_terms.items())
    if outcome.filtered is not None:
        yield f"filtered: {outcome.filtered}"
    pruned = pruned_of(rollout.events)
    for what in pruned:
        yield f"pruned: {what}"
    gone = "turns" in pruned and not rollout.turns
    parts = [] if gone else [plural(len(rollout.turns), "turn"), plural(len(made.forks), "fork")]
    seconds = seconds_of(rollout)
    if seconds is not None:
        parts.append(span(seconds) if seconds >= 1 else "under 1 s")
    if outcome.stop_reason is not None:
        parts.append(f"stopped: {outcome.stop_reason}")
    if parts:
        yield ", ".join(parts)
    refusals = Counter(
        f"{event.data.get('status')} {event.data.get('reason')}"
        for event in rollout.events
        if event.kind == EventKind.REFUSAL
    )
    for why, times in refusals.most_common(_MOST_NAMED):
        yield f"refused: {why}{_times(times, 'request')}"
    ignored = Counter(what for turn in rollout.turns for what in turn.ignored_params)
    for what, times in ignored.most_common(_MOST_NAMED):
        yield f"not applied: {what}{_times(times, 'turn')}"
    fates = ", ".join(f"{tokens:,} {fate}" for fate, tokens in made.ledger.totals().items())
    running = ", as if it had ended now" if rollout.status is Status.RUNNING else ""
    yield (
        f"{plural(made.ledger.sampled, 'sampled token')}{f': {fates}' if fates else ''}; "
        f"{plural(len(made), 'sample')} under {made.policy.name}{running}"
    )


def _times(times: int, what: str) -> str:
    return f" ({plural(times, what)})" if times > 1 else ""


def seconds_of(rollout: Rollout) -> float | None:
    """How long a rollout took: by its turns, else from its start to its finish, or None if unknown."""
    turns = [turn.facts for turn in rollout.turns]
    starts = [facts.started_at for facts in turns if facts.started_at is not None and math.isfinite(facts.started_at)]
    ends = [facts.ended_at for facts in turns if facts.ended_at is not None and math.isfinite(facts.ended_at)]
    if starts and ends:
        return max(max(ends) - min(starts), 0.0)
    finish = next((event for event in reversed(rollout.events) if event.kind == EventKind.FINISH), None)
    return None if finish is None else max((finish.at_ns - rollout.head.started_at_ns) / 1e9, 0.0)
