"""slime's saved samples become rollouts that train the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

import rolltape
from import_sources import slime_sample as sample
from importing import imported, write_lines
from rolltape.errors import ImportFileError


def save(path: Path, samples: list[dict[str, Any]], rollout_id: int = 5) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def test_a_saved_file_gives_groups_with_rewards_and_the_tokens_that_slime_trained(tmp_path: Path) -> None:
    imported("slime", save(tmp_path / "5.pt", [sample(index) for index in range(4)]), tmp_path / "run")
    run = rolltape.read(tmp_path / "run")
    assert [(row.step, row.attempt, row.reward) for row in run.index()] == [(5, 0, 0), (5, 1, 1), (5, 0, 0), (5, 1, 1)]
    made = rolltape.linearize(run.rollout("slime-train-5-1"), "exact").sample(0)
    assert made.trained_mask.tolist() == [False] * 3 + [True, True, False, True]
    assert made.ids.tolist() == [1, 2, 3, 10, 11, 4, 12]
    assert run.index()[0].versions == ("7",)


def test_samples_of_one_rollout_are_its_sessions(tmp_path: Path) -> None:
    parts = [sample(0, rollout_id=9), sample(1, rollout_id=9, tokens=[1, 2, 3, 20, 21, 22, 23])]
    imported("slime", save(tmp_path / "5.pt", parts), tmp_path / "run")
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    assert len(rollout.sessions) == 2


def test_evaluation_is_apart_from_training(tmp_path: Path) -> None:
    imported("slime", save(tmp_path / "eval_5.pt", [sample(0)]), tmp_path / "run")
    assert rolltape.read(tmp_path / "run").index()[0].source == "#eval"


def test_a_broken_rollout_is_failed_and_a_truncated_one_is_an_outcome(tmp_path: Path) -> None:
    samples = [sample(0, status="aborted"), sample(1, status="truncated")]
    imported("slime", save(tmp_path / "5.pt", samples), tmp_path / "run")
    rows = rolltape.read(tmp_path / "run").index()
    assert [(row.status, row.stop_reason, row.reward) for row in rows] == [
        ("failed", None, None),
        ("finished", "max_tokens", 1.0),
    ]


def test_json_lines_and_rewards_of_several_terms(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [sample(0, reward={"score": 0.5, "format": 1.0})])
    imported("slime", file, tmp_path / "run", step=3)
    (row,) = rolltape.read(tmp_path / "run").index()
    assert (row.step, row.reward, row.outcome.reward_terms) == (3, 0.5, {"score": 0.5, "format": 1.0})


@pytest.mark.parametrize("given", [{"reward": {"style": 0.5, "format": float("inf")}}, {"status": "failed"}])
def test_what_a_reward_would_be_made_of_is_kept_if_there_is_no_reward(tmp_path: Path, given: dict[str, Any]) -> None:
    terms = {"score": 0.5, "format": 1.0}
    imported("slime", save(tmp_path / "5.pt", [sample(0, **{"reward": terms, **given})]), tmp_path / "run")
    (row,) = rolltape.read(tmp_path / "run").index()
    assert (row.reward, row.outcome.reward_terms) == (None, {})
    assert row.head.extra["reward_terms"] == given.get("reward", terms)


def test_lengths_that_disagree_are_named(tmp_path: Path) -> None:
    file = save(tmp_path / "5.pt", [sample(0, loss_mask=[1])])
    with pytest.raises(ImportFileError, match=r"5\.pt, sample 1: response_length is 4, but loss_mask has 1 values"):
        imported("slime", file, tmp_path / "run")


class Payload:
    def __reduce__(self) -> Any:
        return (open, ("/tmp/rolltape-was-here", "w"))


def test_a_pickled_object_is_refused_and_not_run(tmp_path: Path) -> None:
    file = save(tmp_path / "5.pt", [sample(0, metadata={"x": Payload()})])
    with pytest.raises(ImportFileError, match="reading them would run code"):
        imported("slime", file, tmp_path / "run")
    assert not Path("/tmp/rolltape-was-here").exists()
