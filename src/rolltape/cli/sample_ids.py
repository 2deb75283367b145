"""Samples by their ids: which rollout one is of, and under which policy it was made."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rolltape.cli.exits import UsageError
from rolltape.records.ids import last_turn_of

if TYPE_CHECKING:
    from rolltape.records.policy import Policy
    from rolltape.records.rollout import Rollout
    from rolltape.records.sample import Sample
    from rolltape.tape.run import Run


def rollout_of_sample(sample_id: str) -> tuple[str, int]:
    """The rollout and the try that a sample is of."""
    parts = last_turn_of(sample_id).rsplit(".", 3)
    if len(parts) != 4 or not parts[1].isdigit():
        raise UsageError(f"ROLLOUT: {sample_id} is no sample id; `rolltape samples --json` gives them")
    return parts[0], int(parts[1])


def sample_named(tape: "Run", rollout: "Rollout", policy: "Policy", sample_id: str) -> "Sample":
    """The sample of that id, under the policy asked for or a preset that its id names."""
    for sample in like_named(tape, rollout, policy, sample_id):
        if sample.id == sample_id:
            return sample
    raise UsageError(
        f"ROLLOUT: there is no sample {sample_id}; give the --policy, --branches and --max-tokens that made it"
    )


def like_named(tape: "Run", rollout: "Rollout", policy: "Policy", sample_id: str) -> "Iterator[Sample]":
    """The samples that end with the turn which that id names, under the policy asked for and under presets.

    Those of the policy that it names come first. It may be none of these, and differ in advantages alone.
    """
    from rolltape.records.policy import PRESETS
    from rolltape.records.rollout import Status
    from rolltape.samples import linearize

    turn = last_turn_of(sample_id)
    running = rollout.status is Status.RUNNING
    for candidate in sorted((policy, *PRESETS.values()), key=lambda one: sample_id != f"{turn}@{one.key}"):
        made = linearize(rollout, candidate, versions=tape.versions(), as_if_finished=running)
        yield from (sample for sample in made.samples() if sample.id.startswith(f"{turn}@"))
