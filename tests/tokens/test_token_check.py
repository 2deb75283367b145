"""`rolltape tokens RUN check`: what the trainer saw is what the tape holds, or each difference is found and named."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import rolltape
from rolltape.cli import run as rolltape_command
from rolltape.records.policy import CutPolicy, LossWeight, RewardShare
from rolltape.records.rollout import EventKind
from rolltape.records.sample import Sample
from rolltape.tokens import list_steps, read_tokens, score_sample, write_tokens
from taped import assistant, first_turn, user
from trained_runs import STEP, SeenRow, export_rows, export_samples, record_groups, samples_of, seen_row


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_groups(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def samples(recorded: Path) -> list[Sample]:
    return samples_of(recorded)


class Checked:
    """The outcome of a check: its exit code, and the lines that it printed."""

    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> None:
        capsys.readouterr()
        self.code = rolltape_command(["tokens", str(run), "check", "--json", *options])
        *lines, self.summary = map(json.loads, capsys.readouterr().out.splitlines())
        self.findings: list[dict[str, Any]] = [line for line in lines if "rule" in line]
        self.notes: list[dict[str, Any]] = [line for line in lines if "note" in line]
        self.unseen: list[dict[str, Any]] = [line for line in lines if "unseen" in line]

    @property
    def rules(self) -> list[str]:
        return sorted({finding["rule"] for finding in self.findings})

    def only(self) -> dict[str, Any]:
        (finding,) = self.findings
        assert self.code == 1
        return finding


def first_trained(row: SeenRow) -> int:
    return int(np.flatnonzero(row.trained)[0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("advantage", ["centered", "normalized"])
@pytest.mark.parametrize(
    "policy",
    [
        "exact",
        "keep-head",
        "slime",
        rolltape.cut_policy("exact", max_staleness=0),
        rolltape.cut_policy(branches="main"),
    ],
    ids=["exact", "keep-head", "slime", "stale-masked", "main-branch"],
)
def test_clean_records_have_no_findings(
    recorded: Path, capsys: pytest.CaptureFixture[str], policy: CutPolicy | str, advantage: str, padded: bool
) -> None:
    made = samples_of(recorded, policy, advantage)
    export_samples(recorded, made, padded=padded)
    checked = Checked(recorded, capsys)
    assert (checked.code, checked.findings) == (0, [])
    assert checked.summary["records"] == len(made)
    assert rolltape_command(["check", str(recorded)]) == 0


def test_records_of_tokens_that_were_stale_at_their_time_have_no_findings_when_there_are_newer_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run")
    fresh, stale = samples_of(run), samples_of(run, rolltape.cut_policy("exact", max_staleness=0))
    late = stale[-1].group  # the trainer got it when there were newer weights than for the others
    with rolltape.open(run) as tape:
        tape.announce_version("9")
    made = [*(one for one in fresh if one.group != late), *(one for one in stale if one.group == late)]
    export_samples(run, made)
    checked = Checked(run, capsys)
    assert (checked.code, checked.findings) == (0, [])


@pytest.mark.parametrize(
    "policy",
    [
        rolltape.cut_policy(branches="main", max_sample_tokens=20),
        rolltape.cut_policy("keep-head", max_sample_tokens=20),
        rolltape.cut_policy("slime", max_staleness=0, max_sample_tokens=22),
    ],
    ids=["main-branch", "keep-head", "slime"],
)
def test_samples_of_groups_that_were_cut_by_a_policy_of_the_trainers_own_are_looked_up_under_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: CutPolicy
) -> None:
    run = record_groups(tmp_path / "run")
    with rolltape.open(run) as tape:
        credit = rolltape.Credit(reward_share=RewardShare.SPLIT, loss_weight=LossWeight.EVEN)
        made = [
            sample for group in tape.groups(policy=policy, credit=credit, complete=False) for sample in group.samples
        ]
    export_samples(run, made)
    checked = Checked(run, capsys)
    assert (checked.code, checked.findings) == (0, [])
    assert checked.summary["records"] == len(made)
    assert rolltape_command(["check", str(run)]) == 0


def test_a_policy_that_this_version_does_not_know_is_not_used(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"group": samples[0].group, "step": STEP, "consumer": "other", "state": "given", "policy": {"new_choice": 1}}
    with rolltape.open(recorded) as tape:
        tape.append_run_event(EventKind.GROUP, data)
    export_samples(recorded, samples)
    assert Checked(recorded, capsys).code == 0


def test_the_kinds_of_run_that_stay_green_differ_from_each_other(recorded: Path) -> None:
    shapes = {
        policy: sum(sample.trained_tokens for sample in samples_of(recorded, policy))
        for policy in ("exact", "keep-head", "slime", rolltape.cut_policy("exact", max_staleness=0))
    }
    assert len(set(shapes.values())) == len(shapes)
    assert any(sample.siblings > 1 for sample in samples_of(recorded))


def test_rotated_advantages_are_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    def rotate(rows: list[SeenRow]) -> None:
        moved = [row.advantage for row in rows[1:]] + [rows[0].advantage]
        for row, advantage in zip(rows, moved, strict=True):
            row.advantage = advantage

    before = [sample.advantage for sample in samples]
    changed = sum(one != other for one, other in zip(before, [*before[1:], before[0]], strict=True))
    export_samples(recorded, samples, rotate)
    checked = Checked(recorded, capsys)
    assert (checked.code, checked.rules) == (1, ["advantage"])
    assert len(checked.findings) == changed
    assert "by its group's rewards (normalized)" in checked.findings[0]["what"]


def test_a_changed_id_is_found_at_its_token(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(rows: list[SeenRow]) -> None:
        rows[3].ids[8] += 1

    export_samples(recorded, samples, change)
    finding = Checked(recorded, capsys).only()
    held = int(samples[3].ids[8])
    assert finding["what"] == f"id {held + 1} in the record, {held} on the tape"
    assert (finding["rule"], finding["step"], finding["record"], finding["token"]) == ("ids", STEP, f"{STEP}.0.3", 8)
    assert (finding["sample"], finding["rollout"]) == (samples[3].id, samples[3].rollout)
    span = next(span for span in samples[3].spans if span.start <= 8 < span.stop)
    assert finding["turn"] == span.turn


def test_a_trained_prompt_token_is_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    export_samples(recorded, samples, lambda rows: rows[2].trained.__setitem__(1, True))
    finding = Checked(recorded, capsys).only()
    assert (finding["rule"], finding["token"]) == ("trained mask", 1)
    assert finding["what"] == "trains in the record, is a prompt token on the tape"


def test_a_record_in_which_nothing_trains_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = record_groups(tmp_path / "run", groups=1)
    samples = samples_of(recorded)
    first, *others = [score_sample(sample, np.full(len(sample.ids), -1.0)) for sample in samples]
    blank = msgspec.structs.replace(first, trained_mask=np.zeros_like(first.trained_mask))
    write_tokens(recorded, STEP, [blank, *others])
    finding = Checked(recorded, capsys).only()
    assert (finding["rule"], finding["sample"]) == ("trained mask", samples[0].id)
    assert finding["what"].startswith("does not train in the record, trains on the tape")


def test_versions_of_replies_that_are_context_under_one_policy_alone_are_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a", step=STEP) as rollout:
        session = rollout.session()
        first_turn(session, prompt_ids=[1, 2], sampled_ids=[3, 4, 5], logprobs=None, weight_version="1")
        echoed = [user("hello"), assistant("h"), user("go on")]
        first_turn(session, prompt_messages=echoed, prompt_ids=[1, 2, 3, 4, 9, 6], weight_version="2")
        rollout.finish(reward=1.0)
    (given,) = rolltape.read(tmp_path / "run").rollouts()
    under = {name: list(rolltape.linearize(given, name).samples(0.0)) for name in ("exact", "keep-head")}
    (ours,), (theirs,) = under["keep-head"], under["exact"]
    assert (ours.id, ours.versions, theirs.versions) == (theirs.id, (("1", "1"), ("2", "2")), (("2", "2"),))
    write_tokens(tmp_path / "run", STEP, [score_sample(ours, ours.logprobs)])
    assert Checked(tmp_path / "run", capsys).findings == []


def test_a_token_that_trains_in_another_sample_and_one_that_should_train_are_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    forked = next(at for at, sample in enumerate(samples) if (sample.sampled_mask & ~sample.trained_mask).any())
    elsewhere = int(np.flatnonzero(samples[forked].sampled_mask & ~samples[forked].trained_mask)[0])

    def change(rows: list[SeenRow]) -> None:
        rows[forked].trained[elsewhere] = True
        rows[0].trained[first_trained(rows[0])] = False

    export_samples(recorded, samples, change)
    whats = {finding["record"]: finding["what"] for finding in Checked(recorded, capsys).findings}
    assert whats[f"{STEP}.0.{forked}"].startswith("trains in the record, trains in another sample on the tape")
    assert whats[f"{STEP}.0.0"] == "does not train in the record, trains on the tape"


def test_every_sample_twice_is_found_and_a_second_epoch_is_not(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [seen_row(sample) for sample in samples]
    export_rows(recorded, [*rows, *rows])
    checked = Checked(recorded, capsys)
    assert (checked.code, checked.rules, len(checked.findings)) == (1, ["trained once"], len(samples))
    assert checked.findings[0]["what"] == f"the sample is also in record {STEP}.0.0, in the same epoch"

    again = [seen_row(sample) for sample in samples]
    for row in again:
        row.epoch = 1
    whole = rows[: len(rows) // 4 * 4]
    export_rows(recorded, [*whole, *again[: len(whole)], *rows[len(whole) :]])
    assert Checked(recorded, capsys).findings == []


def test_samples_with_records_in_several_steps_are_counted_and_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run")
    rows = [seen_row(sample) for sample in samples_of(run)]
    group = [row for row in rows if row.group == rows[0].group]
    export_rows(run, rows)
    export_rows(run, group, step=STEP + 1)
    checked = Checked(run, capsys)
    assert (checked.code, checked.findings, checked.summary["repeated"]) == (0, [], len(group))
    assert Checked(run, capsys, "--step", str(STEP)).summary["repeated"] == 0
    rolltape_command(["tokens", str(run), "check"])
    assert f"{len(group)} samples have records in several steps" in capsys.readouterr().err


def test_a_sample_that_is_left_out_is_found_and_one_without_a_signal_is_listed(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    export_samples(recorded, samples, lambda rows: rows.pop(4))
    checked = Checked(recorded, capsys)
    finding = checked.only()
    assert (finding["rule"], finding["sample"], finding["record"]) == ("complete", samples[4].id, None)
    assert [(one["unseen"], one["why"]) for one in checked.unseen] == [(samples[4].id, "not exported")]


def test_groups_that_the_trainer_never_took_are_listed_and_no_finding(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    taken = samples[0].group
    export_samples(recorded, [sample for sample in samples if sample.group == taken])
    checked = Checked(recorded, capsys)
    assert (checked.code, checked.findings) == (0, [])
    assert sorted(one["unseen"] for one in checked.unseen) == sorted(
        sample.id for sample in samples if sample.group != taken
    )


def test_samples_that_the_exporter_was_told_to_leave_out_are_not_missing(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    export_samples(recorded, samples, sample_fraction=0.5)
    assert 0 < len(list(read_tokens(recorded))) < len(samples)
    checked = Checked(recorded, capsys)
    assert (checked.code, checked.findings) == (0, [])


def test_a_changed_logprob_is_found_at_its_token(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    at = first_trained(seen_row(samples[5])) + 2

    def change(rows: list[SeenRow]) -> None:
        rows[5].logprobs[at] -= 0.25

    export_samples(recorded, samples, change)
    finding = Checked(recorded, capsys).only()
    assert (finding["rule"], finding["token"]) == ("inference logprobs", at)
    held = samples[5].logprobs[at]
    assert finding["what"] == f"logprob {np.float32(held - 0.25):.6g} in the record, {held:.6g} by the engine"


def test_logprobs_and_advantages_that_were_rounded_to_bfloat16_are_the_same(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def change(rows: list[SeenRow]) -> None:
        for row in rows:
            row.logprobs = torch.from_numpy(row.logprobs).bfloat16().float().numpy()
            row.advantage = float(torch.tensor(row.advantage).bfloat16())

    export_samples(recorded, samples, change)
    assert Checked(recorded, capsys).findings == []


def test_a_changed_reward_and_a_changed_loss_weight_are_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(rows: list[SeenRow]) -> None:
        rows[1].reward = 0.9
        rows[2].weight = 1.0

    export_samples(recorded, samples, change)
    checked = Checked(recorded, capsys)
    found = {finding["record"]: (finding["rule"], finding["what"]) for finding in checked.findings}
    assert checked.code == 1
    assert found == {
        f"{STEP}.0.1": ("reward", "reward 0.9 in the record, 0.25 on the tape"),
        f"{STEP}.0.2": (
            "loss weight",
            "loss weight 1 in the record, 0.6667 by its share of its rollout's trained tokens",
        ),
    }


def test_a_sequence_that_was_cut_short_is_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(rows: list[SeenRow]) -> None:
        for name in ("ids", "trained", "logprobs", "positions"):
            setattr(rows[0], name, getattr(rows[0], name)[:-2])

    export_samples(recorded, samples, cut)
    finding = Checked(recorded, capsys).only()
    whole = len(samples[0].ids)
    assert finding["rule"] == "length"
    assert finding["what"] == f"{whole - 2} tokens in the record, {whole} on the tape, 2 of those cut off train"


def test_sample_ids_given_to_the_wrong_sequences_are_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    def swap(rows: list[SeenRow]) -> None:
        rows[0].sample, rows[3].sample = rows[3].sample, rows[0].sample

    export_samples(recorded, samples, swap)
    checked = Checked(recorded, capsys)
    assert checked.code == 1
    assert {"ids", "origin"} <= set(checked.rules)
    assert {finding["record"] for finding in checked.findings} == {f"{STEP}.0.0", f"{STEP}.0.3"}


def test_sequences_packed_without_their_boundaries_are_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    def renumber(rows: list[SeenRow]) -> None:
        rows[1].positions = np.concatenate([np.arange(10), np.arange(len(rows[1].ids) - 10)])

    export_samples(recorded, samples, renumber)
    finding = Checked(recorded, capsys).only()
    assert (finding["rule"], finding["token"], finding["what"]) == ("position ids", 10, "position 0 follows position 9")


def test_positions_that_count_padding_are_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    export_samples(recorded, samples, lambda rows: setattr(rows[1], "positions", rows[1].positions + 3))
    finding = Checked(recorded, capsys).only()
    assert (finding["rule"], finding["token"]) == ("position ids", 0)
    assert finding["what"] == "position 3 is the first, which is 0"


def test_a_wrong_weight_version_is_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    export_samples(recorded, samples, lambda rows: rows[0].versions.append("9"))
    finding = Checked(recorded, capsys).only()
    assert finding["what"] == "weights '9' in the record, sampled by '7', '8' on the tape"


def test_samples_of_two_policies_in_one_step_are_found(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    """Their tokens would train twice, though no sample does."""
    other = [sample for sample in samples_of(recorded, "keep-head") if sample.id not in {one.id for one in samples}]
    export_samples(recorded, [*samples, other[0]])
    checked = Checked(recorded, capsys)
    assert checked.code == 1
    (finding,) = (one for one in checked.findings if one["rule"] == "trained once")
    assert finding["sample"] == other[0].id
    assert finding["what"] == "the sample is made by another cut policy than the others of this step, exact"


def test_what_may_not_train_and_what_is_not_on_the_tape_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=1)
    samples = samples_of(run)
    with rolltape.open(run) as tape:
        tape.filter(samples[0].rollout, "too easy")
    export_samples(run, samples, lambda rows: setattr(rows[-1], "sample", "0" * 32 + ".0.0.0@123456789abc"))
    by_rule = {finding["rule"]: finding["what"] for finding in Checked(run, capsys).findings}
    assert by_rule["outcome"] == "the record trains, but its rollout is filtered on the tape (too easy)"
    assert by_rule["sample"].endswith("no such rollout on the tape")


def test_a_filter_and_a_grade_that_came_after_the_step_are_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=2)
    samples = samples_of(run)
    export_samples(run, samples)
    filtered, graded = samples[0].rollout, samples[-1].rollout
    with rolltape.open(run) as tape:
        tape.filter(filtered, "too easy")
        tape.score(graded, reward=0.125)
    checked = Checked(run, capsys)
    assert (checked.code, checked.findings) == (0, [])
    assert {note["note"] for note in checked.notes} == {"outcome", "reward", "advantage"}
    by_rollout = {note["rollout"]: note["what"] for note in checked.notes if note["note"] in ("outcome", "reward")}
    later = "since a filter, a grade or an attempt that came after the step"
    assert by_rollout == {
        filtered: f"the record trains, but its rollout is filtered on the tape (too easy), {later}",
        graded: f"reward 0.875 in the record, 0.125 on the tape, {later}",
    }
    assert rolltape_command(["check", str(run)]) == 0


def test_a_filter_between_taking_a_group_and_training_on_it_is_a_note_and_one_before_it_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=2)
    with rolltape.open(run) as tape:
        before, after = samples_of(run)[0], samples_of(run)[-1]
        tape.filter(before.rollout, "seen before it was taken")
        for group in tape.groups(complete=False, limit=2):
            group.done()
        tape.filter(after.rollout, "while it was trained on")
    export_samples(run, samples_of(record_groups(tmp_path / "same", groups=2)))
    checked = Checked(run, capsys)
    assert checked.code == 1
    assert {finding["rollout"] for finding in checked.findings} == {before.rollout}
    assert {note["rollout"] for note in checked.notes} == {after.rollout}


@pytest.mark.parametrize("late", ["a straggler", "another try", "a first grade"])
def test_an_attempt_that_came_after_its_group_was_taken_is_a_note(
    late: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with rolltape.open(run, name="exp") as tape:
        # The third one finished with nothing to train, and counts in the mean all the same.
        for attempt, (reward, finish) in enumerate([(1.0, "stop"), (0.0, "stop"), (0.0, "abort")]):
            with tape.rollout(task_id="task", step=STEP, attempt=attempt) as rollout:
                first_turn(rollout.session(), finish=finish)
                rollout.finish(reward=reward)
        straggler = tape.rollout(task_id="task", step=STEP, attempt=3)
        first_turn(straggler.session())
        if late != "a straggler":
            straggler.fail("the engine broke") if late == "another try" else straggler.finish()
        (group,) = tape.groups(complete=False)
        export_samples(run, group.samples)
        group.done()
        if late == "another try":
            straggler = tape.rollout(task_id="task", step=STEP, attempt=3, new_try=True)
            first_turn(straggler.session())
        if late == "a first grade":
            tape.score(straggler.id, reward=1.0)
        else:
            straggler.finish(reward=1.0)
    checked = Checked(run, capsys)
    assert (checked.code, checked.findings) == (0, [])
    assert [note["note"] for note in checked.notes] == ["advantage", "advantage", "complete"]
    assert [one["why"] for one in checked.unseen] == ["no reward" if late == "a first grade" else "came later"]


def test_a_sample_without_a_signal_stays_so_when_its_group_is_graded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=1, attempts=3)  # the second has the mean of the rewards
    samples = samples_of(run)
    export_samples(run, [sample for sample in samples if sample.advantage])
    with rolltape.open(run) as tape:
        tape.score(samples[0].rollout, reward=0.75)
    checked = Checked(run, capsys)
    assert (checked.code, {one["why"] for one in checked.unseen}) == (0, {"advantage 0"})


def test_a_record_that_was_wrong_before_its_rollout_was_graded_again_stays_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=1)
    samples = samples_of(run)
    export_samples(run, samples, lambda rows: setattr(rows[-1], "reward", 0.9))
    with rolltape.open(run) as tape:
        tape.score(samples[-1].rollout, reward=0.125)
    assert [finding["rule"] for finding in Checked(run, capsys).findings] == ["reward"]


def _divided_by_deviation(epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rewards: (rewards - rewards.mean()) / (rewards.std() + epsilon)


def _computed_by_trainer(
    run: Path, by_trainer: Callable[[torch.Tensor], torch.Tensor], *, placeholders: bool = False, most: int = 99
) -> Callable[[list[SeenRow]], None]:
    """Gives rows the advantages that a trainer computes in float32 from the rewards of the first attempts of a group.

    With `placeholders`, attempts without a reward get the mean of the others.
    """
    advantages: dict[str, float] = {}
    for group in {row.group for row in rolltape.read(run).index()}:
        members = [row for row in rolltape.read(run).index() if row.group == group and row.attempt < most]
        known = [row.reward for row in members if row.reward is not None]
        mean = float(np.mean(known))
        counted = [row for row in members if placeholders or row.reward is not None]
        rewards = torch.tensor([mean if row.reward is None else row.reward for row in counted])
        advantages |= {row.id: float(one) for row, one in zip(counted, by_trainer(rewards), strict=True)}

    def give(rows: list[SeenRow]) -> None:
        for row in rows:
            row.advantage = advantages[row.rollout]

    return give


def _grade(run: Path, groups: Sequence[Sequence[float]]) -> None:
    with rolltape.open(run) as tape:
        for row in rolltape.read(run).index():
            tape.score(row.id, reward=groups[int((row.task_id or "").removeprefix("task-"))][row.attempt])


@pytest.mark.parametrize(
    ("kind", "by_trainer"),
    [
        *(("normalized", _divided_by_deviation(epsilon)) for epsilon in (0.0, 1e-6, 1e-4)),
        ("leave-one-out", lambda rewards: rewards - (rewards.sum() - rewards) / (len(rewards) - 1)),
    ],
    ids=["n-1", "n-1 and 1e-6", "n-1 and 1e-4", "leave-one-out"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ways_in_which_trainers_scale_advantages_are_known(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    by_trainer: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> None:
    run = record_groups(tmp_path / "run", attempts=3)
    scaled = _computed_by_trainer(run, lambda rewards: by_trainer(rewards).to(dtype))
    export_samples(run, samples_of(run), scaled)
    assert Checked(run, capsys).findings == []
    assert Checked(run, capsys, "--advantage", kind).findings == []
    assert set(Checked(run, capsys, "--advantage", "centered").rules) == {"advantage"}

    def scaled_but_one(rows: list[SeenRow]) -> None:
        scaled(rows)
        rows[0].advantage = 2 * (rows[0].advantage or 0.0)

    export_samples(run, samples_of(run), scaled_but_one)
    checked = Checked(run, capsys)
    assert checked.rules == ["advantage"]
    assert f"({kind})" in checked.findings[0]["what"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("epsilon", [None, 1e-6, 1e-4])
def test_what_float32_loses_in_the_mean_of_rewards_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epsilon: float | None, dtype: torch.dtype
) -> None:
    """Seven times 0.7 has a mean that is not 0.7, and rewards around 100 leave few digits of their difference."""
    run = record_groups(tmp_path / "run", groups=3, attempts=7, turns=1)
    close = 100 + np.random.default_rng(0).random((2, 7)) / 100
    _grade(run, [[0.7] * 7, *close.tolist()])
    centered: Callable[[torch.Tensor], torch.Tensor] = lambda rewards: rewards - rewards.mean()  # noqa: E731
    by_trainer = centered if epsilon is None else _divided_by_deviation(epsilon)
    export_samples(run, samples_of(run), _computed_by_trainer(run, lambda rewards: by_trainer(rewards).to(dtype)))
    assert Checked(run, capsys).findings == []


def test_rewards_whose_deviation_is_less_than_a_float_can_hold_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=1, attempts=8, turns=1)
    _grade(run, [[5e-324, *[0.0] * 7]])
    export_samples(run, samples_of(run, advantage="centered"))
    assert Checked(run, capsys).findings == []


@pytest.mark.parametrize("others", ["have no reward", "are not taken", "are imported"])
def test_advantages_of_a_part_of_each_group_are_known_whatever_the_way_of_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: str
) -> None:
    run = record_groups(tmp_path / "run", groups=2, attempts=3, turns=1)
    with rolltape.open(run) as tape:
        for task in {"have no reward": ["task-0"], "are not taken": ["task-0", "task-1"]}.get(others, []):
            with tape.rollout(task_id=task, step=STEP, attempt=3) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=None if others == "have no reward" else 0.9)
        for attempt in range(8 * (others == "are imported")):
            with tape.rollout(task_id="elsewhere", step=STEP, attempt=attempt, extra={"imported": "file"}) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=float(attempt))
    scaled = _computed_by_trainer(run, _divided_by_deviation(1e-6), placeholders=others == "have no reward", most=3)

    def give(rows: list[SeenRow]) -> None:
        scaled([row for row in rows if row.rollout in ours])
        for row in rows:
            row.advantage = row.advantage if row.rollout in ours else 5.0

    ours = {row.id for row in rolltape.read(run).index() if row.task_id != "elsewhere" and row.attempt < 3}
    seen = [one for one in samples_of(run) if one.rollout in ours or others == "are imported"]
    export_samples(run, seen, give)
    assert "advantage" not in Checked(run, capsys).rules


@pytest.mark.parametrize(("more", "rules"), [(0.0, []), (0.25, ["advantage"])])
def test_a_lone_attempt_may_have_its_reward_as_its_advantage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: float, rules: list[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=3, attempts=1)

    def reward_it(rows: list[SeenRow]) -> None:
        for row in rows:
            row.advantage = (row.reward or 0.0) + more

    export_samples(run, samples_of(run), reward_it)
    assert Checked(run, capsys).rules == rules


def test_advantages_of_the_trainers_own_making_are_compared_by_their_order(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    def own(rows: list[SeenRow]) -> None:
        for row in rows:
            row.advantage = 3 * (row.advantage or 0.0)

    export_samples(recorded, samples, own)
    assert Checked(recorded, capsys).rules == ["advantage"]
    assert Checked(recorded, capsys, "--advantage", "ordered").findings == []

    def own_but_one(rows: list[SeenRow]) -> None:
        own(rows)
        rows[0].advantage = 9.0

    export_samples(recorded, samples, own_but_one)
    assert Checked(recorded, capsys, "--advantage", "ordered").rules == ["advantage"]
    assert Checked(recorded, capsys, "--advantage", "none").findings == []


def test_findings_are_printed_with_their_place_and_what_to_do_and_check_has_them_too(
    recorded: Path, samples: Sequence[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    export_samples(recorded, samples, lambda rows: rows[0].ids.__setitem__(0, 5))
    assert rolltape_command(["tokens", str(recorded), "check", "--step", str(STEP)]) == 1
    held = int(samples[0].ids[0])
    place = f"step {STEP}, record {STEP}.0.0, sample {samples[0].id}, turn 0.0, token 0"
    assert capsys.readouterr().out.splitlines() == [
        f"{place}: id 5 in the record, {held} on the tape [ids]",
        "    check that sample_ids belong to these sequences and that nothing tokenizes the text again",
        f"{len(samples)} records of 1 step checked against the tape: 1 finding, 1 record disagrees",
    ]
    assert rolltape_command(["check", str(recorded)]) == 1
    assert f"{place}: id 5 in the record, {held} on the tape" in capsys.readouterr().out


def test_of_a_step_in_two_formats_the_stable_one_comes_first_and_no_sample_is_in_several_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_groups(tmp_path / "run", groups=1)
    for file_format in ("jsonl", "parquet"):
        export_samples(run, samples_of(run), file_format=file_format)
    (run / "token_exports" / f"step_{STEP}" / "STABLE").unlink()
    assert [(step.file_format.value, step.stable) for step in list_steps(run)] == [("parquet", True), ("jsonl", False)]
    assert Checked(run, capsys).summary["repeated"] == 0


def test_records_that_name_no_sample_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record_groups(tmp_path / "run", groups=1, attempts=1)
    rows = [seen_row(sample) for sample in samples_of(run)]
    for row in rows:
        row.sample = None
    export_rows(run, rows)
    assert rolltape_command(["tokens", str(run), "check"]) == 3
    assert "none of 1 token record names a sample; give sample_ids in the batch" in capsys.readouterr().err
    assert rolltape_command(["check", str(run)]) == 0
