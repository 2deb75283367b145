"""What a trainer with a row for each attempt gets of a group: samples, rewards of blank rows, and what is left out."""

import logging
from collections.abc import Iterable, Sequence

from rolltape.export.formats.fitting import Form, fitted
from rolltape.groups import Group
from rolltape.records.sample import Sample

log = logging.getLogger("rolltape.integrations")


def samples_by_attempt(group: Group, form: Form) -> dict[int, list[Sample]]:
    """The samples of each attempt that finished, the one with the most trained tokens first. The others are logged."""
    log_unfinished(group)
    attempts = {rollout.id: rollout.head.attempt for rollout in group.rollouts}
    found: dict[int, list[Sample]] = {attempt: [] for attempt in attempts.values()}
    for sample in sorted(fitted(group.samples, form), key=lambda sample: (-sample.trained_tokens, sample.index)):
        found[attempts[sample.rollout]].append(sample)
    return found


def log_unfinished(group: Group) -> None:
    """Log each attempt that is missing from a group, and why."""
    for one in group.unfinished:
        log.warning("rollout %s does not train: it %s: %s", one.rollout, one.status, one.reason)


def report_left_out(group: Group, attempts: Iterable[Sequence[Sample]], trainer: str, remedy: str) -> str | None:
    """A sentence on what a trainer does not get that takes the first sample of each attempt, or None if it gets all."""
    tokens = sum(sample.trained_tokens for samples in attempts for sample in samples[1:])
    if not tokens:
        return None
    report = f"{tokens} tokens of forked rollouts are left out: {trainer} takes one row for each"
    log.warning("group %s: %s; %s takes all", group.id, report, remedy)
    return report


def blank_reward(group: Group | None, attempt: int) -> tuple[float, bool]:
    """The reward for a row that trains nothing, and whether its attempt has this reward on the tape.

    If it has none, it is the mean of its group, which does not change the trainer's own baseline.
    """
    for rollout in group.rollouts if group is not None else ():
        if rollout.head.attempt == attempt and rollout.reward is not None:
            return rollout.reward, True
    return (None if group is None else group.mean_reward) or 0.0, False
