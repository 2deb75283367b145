"""Token records without a trainer's tensors."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import rolltape
from gateways import eventually
from rolltape.errors import MisalignedError, RecordError, TapeWriteError
from rolltape.records.sample import Sample
from rolltape.tokens import TokenExporter, list_steps, read_tokens, score_sample, write_tokens
from taped import record_run
from token_batches import exported, packed, sequence_columns

_DERIVED = ("log_ratio", "ratio", "mismatch_kl", "prob_delta")


def samples_in(run: Path) -> list[Sample]:
    record_run(run)
    return [sample for rollout in rolltape.read(run).rollouts() for sample in rolltape.linearize(rollout).samples()]


def theirs(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Logprobs a little below the engine's; of the first id there is none."""
    given = np.where(np.isnan(sample.logprobs), -1.5, sample.logprobs - 0.25).astype(np.float32)
    given[0] = np.nan
    return given


def test_a_scored_sample_says_where_it_came_from_and_how_far_the_two_are_apart(tmp_path: Path) -> None:
    (sample, *_) = samples_in(tmp_path / "run")
    record = score_sample(sample, theirs(sample))
    assert (record.sample, record.rollout, record.group, record.reward) == (
        sample.id,
        sample.rollout,
        sample.group,
        sample.reward,
    )
    np.testing.assert_array_equal(record.trained_mask, sample.trained_mask)
    assert record.mismatch_kl is not None
    trained = record.mismatch_kl[sample.trained_mask]
    np.testing.assert_allclose(trained, np.exp(-0.25) - 1 + 0.25, rtol=1e-5)


def test_what_is_derived_is_what_the_exporter_derives(tmp_path: Path) -> None:
    samples = samples_in(tmp_path / "run")
    record = score_sample(samples[0], theirs(samples[0]))
    columns = {
        **sequence_columns(len(record), 0, record.trained_mask.tolist()),
        "ids": torch.tensor(record.ids.tolist()),
        "inference_logprobs": torch.from_numpy(record.inference_logprobs),
        "trainer_logprobs": torch.from_numpy(record.trainer_logprobs),
    }
    exported(tmp_path / "other", packed([columns]))
    (other,) = read_tokens(tmp_path / "other")
    for name in _DERIVED:
        np.testing.assert_allclose(record.columns()[name], other.columns()[name], rtol=1e-6, atol=1e-7)


def test_written_records_are_a_stable_step_and_read_as_they_were(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = [score_sample(sample, theirs(sample)) for sample in samples_in(run)]
    assert write_tokens(run, 3, made) == len(made) > 1
    (step,) = list_steps(run)
    assert (step.step, step.stable) == (3, True)
    held = list(read_tokens(run))
    assert [record.place for record in held] == [f"3.0.{place}" for place in range(len(made))]
    for wrote, read in zip(made, held, strict=True):
        assert (wrote.sample, wrote.versions, wrote.reward) == (read.sample, read.versions, read.reward)
        assert wrote.columns().keys() == read.columns().keys()
        for name, values in wrote.columns().items():
            np.testing.assert_array_equal(values, read.columns()[name])


def test_writing_a_step_again_replaces_it_and_an_empty_one_is_written_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = [score_sample(sample, theirs(sample)) for sample in samples_in(run)]
    write_tokens(run, 3, made)
    write_tokens(run, 3, made[:1])
    assert len(list(read_tokens(run))) == 1
    assert write_tokens(run, 3, []) == 0
    assert list_steps(run)[0].stable
    assert list(read_tokens(run)) == []


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (sample, *_) = samples_in(tmp_path / "run")
    with pytest.raises(MisalignedError, match=rf"{len(sample.ids)} ids, but logprobs of shape \(3,\)"):
        score_sample(sample, [-1.0, -2.0, -3.0])
    with pytest.raises(RecordError, match="written to a path, not to a URL"):
        write_tokens("memory://run", 0, [])
    with pytest.raises(RecordError, match="step is -1; give 0 or more"):
        write_tokens(tmp_path / "run", -1, [])
    assert list_steps(tmp_path / "run") == []


async def test_what_a_trainer_wrote_stays_and_its_exporter_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = [score_sample(sample, theirs(sample)) for sample in samples_in(run)]
    columns = sequence_columns(8)
    with TokenExporter(run, rank=0, world_size=1) as exporter:
        exporter.export(3, 0, *packed([columns]))
        exporter.mark_stable(3)
        await eventually(lambda: [step.stable for step in list_steps(run)] == [True])
        with pytest.raises(TapeWriteError, match="token records; choose another step"):
            write_tokens(run, 3, made)
        write_tokens(run, 4, made)
        exporter.export(5, 0, *packed([columns]))
        exporter.mark_stable(5)
    assert exporter.report().complete
    assert {step.step: (step.stable, sum(done.records for done in step.ranks)) for step in list_steps(run)} == {
        3: (True, 1),
        4: (True, len(made)),
        5: (True, 1),
    }


def test_columns_made_by_hand_are_stored_in_the_files_types_or_refused(tmp_path: Path) -> None:
    (sample, *_) = samples_in(tmp_path / "run")
    record = score_sample(sample, theirs(sample))
    wide = msgspec.structs.replace(record, ids=record.ids.astype(np.int64), ratio=np.ones(len(record)))
    write_tokens(tmp_path / "run", 0, [wide])
    (read,) = read_tokens(tmp_path / "run")
    assert read.ids.dtype == np.int32
    np.testing.assert_array_equal(read.ids, record.ids)
    odd = msgspec.structs.replace(record, ids=record.ids.astype(np.int64) << 40)
    with pytest.raises(RecordError, match="ids are not all 32-bit integers"):
        write_tokens(tmp_path / "run", 0, [odd])
    assert len(list(read_tokens(tmp_path / "run"))) == 1, "what was there is there still"
    assert not list((tmp_path / "run" / "tokens").glob(".*"))


def test_many_tokens_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    made = [score_sample(sample, theirs(sample)) for sample in samples_in(run)] * 3
    monkeypatch.setattr("rolltape.tokens.files.PART_TOKENS", 2 * len(made[0]))
    write_tokens(run, 0, made)
    assert len(list(list_steps(run)[0].paths())) > 1
    assert [record.sequence for record in read_tokens(run)] == list(range(len(made)))
