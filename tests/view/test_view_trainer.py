"""What a trainer exported, on the page of the sample and of the step that it came from."""

from pathlib import Path

import numpy as np
import torch

import rolltape
from rolltape.records.sample import Sample
from rolltape.tokens import Dppo, read_tokens
from rolltape.tokens.join import standouts
from rolltape.tokens.summary import summarized
from rolltape.view.tokens import TRAINER_COLUMNS
from rolltape.view.trainer import trainer_news
from taped import first_turn, record_run
from token_batches import exported, packed, sequence_columns
from view_columns import unpacked
from viewing import answers_for, asking


def export(run: Path, cut: int = 0) -> list[Sample]:
    """Samples of a run as a trainer saw them, the last tokens of each cut off."""
    samples = [sample for rollout in rolltape.read(run).rollouts() for sample in rolltape.linearize(rollout).samples()]
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
            header, columns = unpacked(answers.tokens(row, sample.index, "exact")())
            assert header["missing"] == []
            assert header["trainer"] == {"step": 7, "place": records[sample.id].place, "joined": True}
            held = records[sample.id].columns()
            for name, column in TRAINER_COLUMNS.items():
                np.testing.assert_array_equal(columns[name][:-1], held[column])
                assert np.isnan(columns[name][-1]) or columns[name][-1] == 0


def test_columns_of_other_ids_are_not_joined(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    samples = [
        sample for one in rolltape.read(tmp_path / "run").rollouts() for sample in rolltape.linearize(one).samples()
    ]
    sequences = [sequence_columns(len(sample.ids), seed) for seed, sample in enumerate(samples)]
    exported(tmp_path / "run", packed(sequences, sample_ids=[sample.id for sample in samples]))
    with answers_for(tmp_path / "run") as answers:
        header, _ = unpacked(answers.tokens(answers.row(samples[0].rollout, None), 0, None)())
        assert header["trainer"]["joined"] is False
        assert header["missing"] == list(TRAINER_COLUMNS)


async def test_a_steps_figures_are_those_of_its_token_records(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="exp") as tape, tape.rollout(task_id="t", step=7) as rollout:
        first_turn(rollout.session())
        rollout.finish(reward=1.0)
    export(tmp_path / "run")
    figures = summarized(7, read_tokens(tmp_path / "run"))
    async with asking(tmp_path / "run") as ask:
        overview = await ask.until("/api/exp/overview", lambda one: one["by_step"] and one["by_step"][0]["trainer"])
        told = overview["by_step"][0]["trainer"]
        assert told["mismatch_kl"] == figures.mismatch_kl
        assert told["entropy"] == figures.entropy
        assert told["masked"] == figures.masked
        (worst,) = standouts(read_tokens(tmp_path / "run"), "mismatch_kl", 1)
        at = {"rollout": rollout.id, "sample_id": worst.record.sample, "token": worst.at}
        assert (told["max_mismatch_kl"], told["max_mismatch_at"]) == (worst.value, at)
    (one,) = trainer_news(tmp_path / "run", {})
    assert list(trainer_news(tmp_path / "run", {7: one.mark})) == []
