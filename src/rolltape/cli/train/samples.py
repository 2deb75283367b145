"""`rolltape samples`: list training samples under a cut policy, or compare two policies."""

from collections import Counter
from typing import Annotated

from rolltape.cli.options import JsonOption, RunArgument, Selection, TokenizerOption, TrainingOptions
from rolltape.cli.parameters import option
from rolltape.cli.runs import SelectedRollouts, excerpt, open_run, open_spellings, report_problems
from rolltape.cli.screen import SHORT_ID, count, number, plural, print_json, print_line, print_table, tracked
from rolltape.errors import UsageError
from rolltape.export.schema import SAMPLE
from rolltape.records.policy import Credit, CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.samples import advantages_of
from rolltape.samples.compare import FateDifference, compare
from rolltape.samples.spelling import Spellings

_KINDS = ("samples", "trained", "masked", "dropped")


def samples(
    run: RunArgument,
    *,
    which: Selection,
    training: TrainingOptions,
    compare: Annotated[str | None, option("--compare POLICY", "Show where another policy differs.")] = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """List training samples, or compare two cut policies."""
    policy, credit = training.cut_policy(), training.credit()
    other = None if compare is None else training.cut_policy(compare, "--compare")
    if compare == training.policy:
        raise UsageError(f"--compare {compare}: this is the policy itself; name another")
    tape = open_run(run)
    selected = SelectedRollouts(tape, which, counted_only=True)
    with selected.named_in_errors():
        if other is not None:
            _compare(selected, policy, other, open_spellings(tokenizer), as_json=as_json)
        elif as_json:
            for sample in selected.samples(policy, credit):
                print_json(_record(sample))
        else:
            _print_table(selected, policy, credit)
    return report_problems(tape)


def _print_table(selected: SelectedRollouts, policy: CutPolicy, credit: Credit) -> None:
    rows: list[list[str]] = []
    tokens = trained = 0
    advantages = advantages_of(selected.opened.rows, credit.advantage)
    for made in selected.linearized(policy, credit):
        advantage = number(advantages.get(made.rollout.key))
        for outline in made.outlines:
            tokens += outline.tokens
            trained += outline.trained_tokens
            first, last = (turn.rpartition(".")[2] for turn in (outline.first_turn, outline.last_turn))
            rows.append(
                [
                    made.rollout.id[:SHORT_ID],
                    str(outline.index),
                    outline.session.rpartition(".")[2],
                    first if first == last else f"{first}-{last}",
                    count(outline.tokens),
                    count(outline.prompt_tokens),
                    count(outline.trained_tokens),
                    number(outline.reward),
                    advantage,
                    number(outline.loss_weight),
                ]
            )
    columns = "rollout sample session turns tokens prompt trained reward advantage weight"
    print_table(columns.split(), rows, left=["rollout"], spare=["session", "prompt", "weight", "turns"])
    print_line(
        f"{plural(len(rows), 'sample')} of {plural(len(selected), 'rollout')} under {policy.name}: "
        f"{plural(tokens, 'token')}, {trained:,} trained"
    )


def _record(sample: Sample) -> dict[str, object]:
    """A sample without its per-token arrays, which `rolltape export` writes."""
    arrays = ("ids", "trained_mask", "sampled_mask", "logprobs", "version_index", "side", "logprob_dtype")
    row = {name: value for name, value in SAMPLE.row(sample).items() if name not in arrays}
    return {**row, "tokens": len(sample.ids), "sampled_tokens": int(sample.sampled_mask.sum())}


def _compare(
    selected: SelectedRollouts, one: CutPolicy, other: CutPolicy, spellings: Spellings, *, as_json: bool
) -> None:
    """Print the totals under both policies, and the tokens on which they differ."""
    versions = selected.opened.run.versions()
    totals: dict[str, Counter[str]] = {one.name: Counter(), other.name: Counter()}
    differing: list[list[str]] = []
    tokens = 0
    for rollout in tracked(selected, "comparing", len(selected)):
        compared = compare(rollout, one, other, versions=versions)
        for made in (compared.left, compared.right):
            total = totals[made.policy.name]
            total["samples"] += len(made)
            for fate, amount in made.ledger.totals().items():
                total[fate.partition(":")[0]] += amount
        for apart in compared.differences:
            tokens += apart.stop - apart.start
            if as_json:
                place = {"turn": apart.turn, "start": apart.start, "stop": apart.stop}
                fates = {"one": apart.left, "other": apart.right}
                print_json({"rollout": rollout.id, "try_index": rollout.head.try_index, **place, **fates})
            else:
                differing.append(_cells(rollout, apart, spellings))
    if as_json:
        for policy in (one, other):
            counts = {kind: totals[policy.name][kind] for kind in _KINDS}
            print_json({"policy": policy.name, "key": policy.key, **counts})
        return
    amounts = [[name, *(count(total[kind]) for kind in _KINDS)] for name, total in totals.items()]
    print_table(["policy", *_KINDS], amounts, left=["policy"])
    print_line("")
    if not differing:
        print_line("Every sampled token has the same fate under both policies.")
        return
    print_line(f"{plural(tokens, 'sampled token')} with different fates:")
    print_table(["turn", "tokens", *totals, "text"], differing, left=["turn", *totals, "text"], flexible=["text"])


def _cells(rollout: Rollout, apart: FateDifference, spellings: Spellings) -> list[str]:
    session, turn = next(
        (session, turn) for session in rollout.sessions for turn in session.turns if turn.id == apart.turn
    )
    ids = turn.sampled_ids[apart.start : apart.stop].tolist()
    place = f"{rollout.id[:SHORT_ID]} {session.ordinal}.{turn.sequence}"
    return [place, f"{apart.start}-{apart.stop}", apart.left, apart.right, excerpt(ids, spellings.of(session))]
