"""Finds a sample by its id: its rollout, and the policy that made it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rolltape.errors import UsageError
from rolltape.records.ids import is_sample_id_of_0_1, last_turn_of, names_sample

if TYPE_CHECKING:
    from rolltape.records.policy import CutPolicy
    from rolltape.records.rollout import Rollout
    from rolltape.records.sample import Sample
    from rolltape.tape.run import Run


def rollout_of_sample(sample_id: str) -> tuple[str, int]:
    """The rollout and the try of a sample."""
    parts = last_turn_of(sample_id).rsplit(".", 3)
    if len(parts) != 4 or not parts[1].isdigit():
        raise UsageError(f"ROLLOUT {sample_id}: not a sample id; `rolltape samples --json` lists them")
    return parts[0], int(parts[1])


def find_sample(tape: "Run", rollout: "Rollout", policy: "CutPolicy", sample_id: str) -> "Sample":
    """The sample with that id."""
    for sample in samples_named(tape, rollout, policy, sample_id):
        return sample
    raise UsageError(
        f"ROLLOUT: there is no sample {sample_id}; give the --policy, --branches, and --max-sample-tokens that made it"
    )


def samples_named(tape: "Run", rollout: "Rollout", policy: "CutPolicy", sample_id: str) -> "Iterator[Sample]":
    """The samples that an id may mean, under the given policy and the presets: one, unless the id is of 0.1.0.

    An id of 0.1.0 begins with the name of its policy, whose samples come first.
    """
    from rolltape.records.policy import PRESETS
    from rolltape.records.rollout import Status
    from rolltape.samples import linearize_under

    policies = [policy, *PRESETS.values()]
    if is_sample_id_of_0_1(sample_id):
        policies.sort(key=lambda one: not sample_id.partition("@")[2].startswith(f"{one.name}-"))
    running = rollout.status is Status.RUNNING
    seen: set[str] = set()
    for made in linearize_under(rollout, policies, versions=tape.versions(), as_if_finished=running):
        for outline in made.outlines:
            if outline.id not in seen and names_sample(sample_id, outline.id):
                seen.add(outline.id)
                yield made.sample(outline.index)
