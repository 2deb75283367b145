"""`rolltape export --format FRAMEWORK`: samples as another framework's training step takes them."""

from contextlib import closing
from typing import TYPE_CHECKING

from rolltape.cli.output.screen import note

if TYPE_CHECKING:
    from rolltape.cli.runs import Chosen
    from rolltape.records.policy import Credit, CutPolicy


def write_for(
    framework: str,
    chosen: "Chosen",
    policy: "CutPolicy",
    credit: "Credit",
    out: str,
    *,
    temperature: float | None,
    logprobs: bool,
) -> int:
    """Write the chosen rollouts' samples, and say what the format cannot carry; how many were written."""
    from rolltape.cli.sampling import samples_of
    from rolltape.export.formats import Choices, write_samples_for

    choices = Choices(
        versions=tuple(chosen.opened.run.versions()),
        temperature=temperature,
        env_name=chosen.opened.run.name,
        logprobs=logprobs,
    )
    # Closed before an error is shown, since a progress bar runs with them.
    with closing(samples_of(chosen, policy, credit)) as samples:
        written = write_samples_for(framework, samples, out, choices)
    for sentence in written.left_out:
        note(sentence)
    return written.samples
