"""`rolltape show`: samples as readable lines."""

from typing import TYPE_CHECKING

from rolltape.cli.exits import UsageError
from rolltape.cli.options import (
    BranchesOption,
    JsonOption,
    MaxTokensOption,
    PolicyOption,
    RolloutArgument,
    RunArgument,
    StalenessOption,
    TokenizerOption,
    TryOption,
    chosen_policy,
)

if TYPE_CHECKING:
    from rolltape.records.policy import Policy
    from rolltape.records.rollout import Rollout
    from rolltape.records.sample import Sample
    from rolltape.tape.run import Run


def show(
    run: RunArgument,
    rollout: RolloutArgument = None,
    policy: PolicyOption = "exact",
    branches: BranchesOption = None,
    max_tokens: MaxTokensOption = None,
    max_staleness: StalenessOption = None,
    try_index: TryOption = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Print samples as readable lines.

    «Trained», ‹sampled but not trained here›, and context plain. ROLLOUT may also be a sample id.
    """
    from rolltape.cli.runs import Chosen, ended, opened
    from rolltape.cli.screen import number, plural, print_json, print_line, print_long
    from rolltape.cli.tokenizer import Texts
    from rolltape.samples import show as line_of

    chosen_one = chosen_policy(policy, branches=branches, max_tokens=max_tokens, max_staleness=max_staleness)
    tape = opened(run)
    texts = Texts(tokenizer, run)
    sample_id = rollout if rollout is not None and "@" in rollout else None
    if sample_id is not None:
        rollout, try_index = rollout_of_sample(sample_id)
    chosen = Chosen(tape, rollout, try_index=try_index, counted_only=True)
    meant = chosen.only()
    with chosen.named_in_errors():
        found = (
            sample_named(tape.run, meant, chosen_one, sample_id) if sample_id else _samples(tape.run, meant, chosen_one)
        )
        sessions = {session.id: session for session in meant.sessions}
        lines = [line_of(sample, texts.of(sessions[sample.session])) for sample in found]
    for sample, line in zip(found, lines, strict=True):
        if as_json:
            print_json({"sample": sample.id, "line": line})
            continue
        if sample_id is None:
            reward = "" if sample.reward is None else f", reward {number(sample.reward)}"
            print_line(
                f"sample {sample.index} of {sample.siblings} ({policy}): {plural(len(sample.ids), 'token')}, "
                f"{sample.trained_tokens:,} trained{reward}",
                style="bold",
            )
        print_long(line)
    if not found and not as_json:
        print_line("No sample: nothing in this rollout trains; `rolltape ledger` says why.")
    return ended(tape)


def _samples(tape: "Run", rollout: "Rollout", policy: "Policy") -> list["Sample"]:
    from rolltape.samples import linearize

    return list(linearize(rollout, policy, versions=tape.versions()).samples())


def rollout_of_sample(sample_id: str) -> tuple[str, int]:
    """The rollout and the try that a sample is of."""
    turn = sample_id.partition("@")[0]
    parts = turn.rsplit(".", 3)
    if len(parts) != 4 or not parts[1].isdigit():
        raise UsageError(f"ROLLOUT: {sample_id} is no sample id; `rolltape samples --json` gives them")
    return parts[0], int(parts[1])


def sample_named(tape: "Run", rollout: "Rollout", policy: "Policy", sample_id: str) -> list["Sample"]:
    """The sample of that id, under the policy asked for or a preset that its id names."""
    from rolltape.records.policy import PRESETS

    for candidate in (policy, *PRESETS.values()):
        if sample_id.endswith(f"@{candidate.key}"):
            found = [sample for sample in _samples(tape, rollout, candidate) if sample.id == sample_id]
            if found:
                return found
    raise UsageError(
        f"ROLLOUT: there is no sample {sample_id}; give the --policy, --branches and --max-tokens that made it"
    )
