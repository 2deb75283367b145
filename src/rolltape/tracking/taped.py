"""One split at one step of a tape → what a tracker is given of it."""

from collections.abc import Sequence

from rolltape.records.choice import Candidate, Pick
from rolltape.records.policy import CutPolicy
from rolltape.records.summary import ShownStep
from rolltape.samples import counted_tries, linearize
from rolltape.tape.run import RolloutRow, Run
from rolltape.traces import trace_of
from rolltape.tracking.steps import StepKey, by_step
from rolltape.tracking.summary import Tally


def step_of_tape(
    run: Run, key: StepKey, pick: Pick, policy: CutPolicy | str = "exact", *, default_split: str = "train"
) -> ShownStep:
    """The step as it is on the tape now."""
    with run.snapshot() as held:
        rows = by_step(held.index(), default_split).get(key, [])
        return step_of_rows(held, key, rows, pick, policy, held.versions())


def step_of_rows(
    run: Run, key: StepKey, rows: Sequence[RolloutRow], pick: Pick, policy: CutPolicy | str, versions: Sequence[str]
) -> ShownStep:
    """The step that these rollouts are of: of each the try that counts, loaded one at a time."""
    counted = in_order(counted_tries(rows))
    candidates = [Candidate(f"{row.id}.{row.head.try_index}", row.outcome.reward) for row in counted]
    picked = set(pick(key.split, key.step, candidates))
    tally, traces = Tally(versions), []
    for position, row in enumerate(counted):
        rollout = run.rollout(row.id, row.head.try_index)
        tally.add(linearize(rollout, policy, versions=versions))
        if position in picked:
            traces.append(trace_of(rollout))
    return ShownStep(split=key.split, step=key.step, traces=tuple(traces), summary=tally.summary())


def in_order(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    """First attempts first, then by task: an order that does not depend on when a rollout began or ended."""
    return sorted(rows, key=lambda row: (row.head.attempt, row.head.task_id or "", row.id))
