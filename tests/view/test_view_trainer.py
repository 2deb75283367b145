"""What a trainer exported, on the page of the sample and of the step that it came from."""

from pathlib import Path

import numpy as np
import pytest
import torch

import rolltape
from rolltape.errors import NoAnswer
from rolltape.records.ids import last_turn_of, sample_id
from rolltape.records.policy import Advantage, Credit, CutPolicy
from rolltape.records.sample import Sample
from rolltape.tokens import Dppo, read_tokens
from rolltape.tokens.summary import largest_tokens, summarize_step
from rolltape.view.rollout.tokens import TRAINER_COLUMNS
from rolltape.view.run.state import TokenPlace
from rolltape.view.run.trainer import changed_figures
from taped import first_turn, record_run
from token_batches import exported, packed, sequence_columns
from view_columns import unpacked
from viewing import answers_for, asking


def export(run: Path, cut: int = 0, policy: CutPolicy | str = "exact", credit: Credit | None = None) -> list[Sample]:
    """Samples of a run as a trainer saw them, the last tokens of each cut off."""
    rollouts = rolltape.read(run).rollouts()
    samples = [
        sample for rollout in rollouts for sample in rolltape.linearize(rollout, policy, credit=credit).samples()
    ]
    sequences = []
    for seed, sample in enumerate(samples):
        length = len(sample.ids) - cut
        trained = sample.trained_mask[:length].tolist()
        columns = sequence_columns(length, seed, trained)
        sequences.append({**columns, "ids": torch.tensor(sample.ids[:length].tolist())})
    exported(run, packed(sequences, sample_ids=[sample.id for sample in samples]), loss=Dppo())
    return samples


def test_a_samples_columns_are_those_that_the_trainer_exported(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    samples = export(tmp_path / "run", cut=1)
    records = {record.sample: record for record in read_tokens(tmp_path / "run")}
    with answers_for(tmp_path / "run") as answers:
        for sample in samples:
            row = answers.row(sample.rollout, None)
            header, columns = unpacked(answers.shown(row).tokens(sample.index, "exact"))
            assert header["missing"] == []
            place = records[sample.id].place
            assert header["trainer"] == {
                "step": 7,
                "place": place,
                "sample": sample.id,
                "joined": True,
                "tokens": len(sample.ids) - 1,
                "records": [{"step": 7, "place": place}],
            }
            held = records[sample.id].columns()
            for name, column in TRAINER_COLUMNS.items():
                np.testing.assert_array_equal(columns[name][:-1], held[column])
                assert np.isnan(columns[name][-1]) or columns[name][-1] == 0


def test_columns_of_a_trainer_with_other_credit_are_those_of_the_same_sample(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    samples = export(tmp_path / "run", credit=Credit(advantage=Advantage.NORMALIZED))
    with answers_for(tmp_path / "run") as answers:
        for sample in samples:
            header, _ = unpacked(answers.shown(answers.row(sample.rollout, None)).tokens(sample.index, "exact"))
            assert header["sample"]["id"] == sample.id
            assert header["trainer"]["joined"] is True


def test_columns_of_the_same_tokens_of_which_others_train_are_not_joined(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    (sample, *_) = export(tmp_path / "run")
    elsewhere = sample_id(last_turn_of(sample.id), len(sample.ids), [(0, 1)])
    columns = {**sequence_columns(len(sample.ids), 1), "ids": torch.tensor(sample.ids)}
    exported(tmp_path / "run", packed([columns], sample_ids=[elsewhere]))
    with answers_for(tmp_path / "run") as answers:
        header, _ = unpacked(answers.shown(answers.row(sample.rollout, None)).tokens(sample.index, "exact"))
    assert header["trainer"] is None


def test_records_with_sample_ids_of_0_1_0_are_found_by_their_last_turn_and_tokens(tmp_path: Path) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1)
    samples = list(rolltape.linearize(rolltape.read(tmp_path / "run").rollout(rollout_id)).samples())
    old = [f"{last_turn_of(sample.id)}@mine-0badf00d" for sample in samples]
    columns = [
        {**sequence_columns(len(sample.ids), seed), "ids": torch.tensor(sample.ids)}
        for seed, sample in enumerate(samples)
    ]
    exported(tmp_path / "run", packed(columns, sample_ids=old))
    with answers_for(tmp_path / "run") as answers:
        for sample in samples:
            header, _ = unpacked(answers.shown(answers.row(rollout_id, None)).tokens(sample.index, "exact"))
            assert header["trainer"]["joined"] is True


def test_columns_of_other_ids_are_not_joined(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    samples = [
        sample for one in rolltape.read(tmp_path / "run").rollouts() for sample in rolltape.linearize(one).samples()
    ]
    sequences = [sequence_columns(len(sample.ids), seed) for seed, sample in enumerate(samples)]
    exported(tmp_path / "run", packed(sequences, sample_ids=[sample.id for sample in samples]))
    with answers_for(tmp_path / "run") as answers:
        header, _ = unpacked(answers.shown(answers.row(samples[0].rollout, None)).tokens(0, None))
        assert header["trainer"]["joined"] is False
        assert header["missing"] == list(TRAINER_COLUMNS)


async def test_a_steps_figures_are_those_of_its_token_records(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="exp") as tape, tape.rollout(task_id="t", step=7) as rollout:
        first_turn(rollout.session())
        rollout.finish(reward=1.0)
    export(tmp_path / "run")
    figures = summarize_step(7, read_tokens(tmp_path / "run"))
    async with asking(tmp_path / "run") as ask:
        overview = await ask.until("/api/exp/overview", lambda one: one["by_step"] and one["by_step"][0]["trainer"])
        told = overview["by_step"][0]["trainer"]
        assert told["mismatch_kl"] == figures.mismatch_kl
        assert told["entropy"] == figures.entropy
        assert told["masked"] == figures.masked
        (worst,) = largest_tokens(read_tokens(tmp_path / "run"), "mismatch_kl", 1)
        at = {"rollout": rollout.id, "sample_id": worst.record.sample, "token": worst.at, "place": worst.record.place}
        assert (told["max_mismatch_kl"], told["max_mismatch_at"]) == (worst.value, at)
    (one,) = changed_figures(tmp_path / "run", {})
    assert list(changed_figures(tmp_path / "run", {7: one.mark})) == []


def test_a_sample_that_was_trained_on_twice_has_both_records_to_choose_from(tmp_path: Path) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1, turns=1)
    (sample,) = rolltape.linearize(rolltape.read(tmp_path / "run").rollout(rollout_id)).samples()
    twice = [
        {**sequence_columns(len(sample.ids), seed, sample.trained_mask.tolist()), "ids": torch.tensor(sample.ids)}
        for seed in (1, 2)
    ]
    records = exported(tmp_path / "run", packed(twice, sample_ids=[sample.id, sample.id]))
    places = [record.place for record in records]
    with answers_for(tmp_path / "run") as answers:
        row = answers.row(rollout_id, None)
        for place, shown in ((None, records[1]), (places[0], records[0]), (places[1], records[1])):
            header, columns = unpacked(answers.shown(row).tokens(0, None, record=place))
            assert header["trainer"]["place"] == shown.place
            assert header["trainer"]["records"] == [{"step": 7, "place": place} for place in places]
            np.testing.assert_array_equal(columns["entropy"], shown.entropy)
        with pytest.raises(NoAnswer, match=r"the trainer wrote no record '9\.9\.9'"):
            answers.shown(row).tokens(0, None, record="9.9.9")


def test_the_largest_mismatch_leads_to_a_token_that_has_it_though_others_are_not_numbers(tmp_path: Path) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1, turns=1)
    (sample,) = rolltape.linearize(rolltape.read(tmp_path / "run").rollout(rollout_id)).samples()
    columns = {**sequence_columns(len(sample.ids), 1, sample.trained_mask.tolist()), "ids": torch.tensor(sample.ids)}
    first, second = np.flatnonzero(sample.trained_mask).tolist()
    columns["trainer_logprobs"][first] = float("nan")
    (record,) = exported(tmp_path / "run", packed([columns], sample_ids=[sample.id]))
    (told,) = changed_figures(tmp_path / "run", {})
    assert record.mismatch_kl is not None
    assert told.figures["max_mismatch_kl"] == record.mismatch_kl[second]
    assert told.max_mismatch_at == TokenPlace(rollout_id, sample.id, second, record.place)


async def test_a_step_that_only_the_trainer_knows_is_shown_too(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=1)  # of step 0; the trainer exports its step 7
    export(tmp_path / "run")
    async with asking(tmp_path / "run") as ask:
        overview = await ask.until("/api/exp/overview", lambda one: len(one["by_step"]) == 2)
        rollouts, trained = overview["by_step"]
        assert (rollouts["step"], rollouts["trainer"]) == (0, None)
        assert (trained["step"], trained["rollouts"], trained["reward"]) == (7, 0, None)
        assert trained["trainer"]["mismatch_kl"] > 0
