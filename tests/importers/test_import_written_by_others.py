"""Imports of files that the other project's own code wrote, where it can be installed here.

TRL's are in tests/integrations/test_trl_training.py, Inspect's in tests/gateway/test_gateway_inspect.py.
"""

import ast
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

import rolltape
from harbor_models import harbor_trajectories
from import_sources import trace, trajectory
from importing import ANSWER, QUESTION, imported
from rolltape.errors import ImportFileError
from rolltape.importers import guess


def test_episodes_as_verifiers_writes_them(tmp_path: Path) -> None:
    from verifiers.v1 import Episode, Trace
    from verifiers.v1.utils.trace_store import write_episode

    made = trace()
    made["agent"]["config"] = {}
    traces = [Trace.model_validate({**made, "id": name}) for name in ("trace-1", "trace-2")]
    about = {"id": "e1", "env": {"id": "sums"}, "ok": True, "task": made["task"], "traces": []}
    episode = Episode.model_validate(about)
    write_episode(tmp_path, episode.model_copy(update={"traces": traces}))
    assert guess(tmp_path) == {"verifiers": "traces of version 1"}
    assert imported("verifiers", tmp_path, tmp_path / "run").imported == 1
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    assert {"e1", "trace-1", "trace-2"} <= set(rollout.head.foreign_ids)
    assert rollout.head.source == "sums"
    assert [len(turn.sampled_ids) for turn in rollout.turns][:1] == [2]
    assert rollout.turns[0].logprobs is not None


def test_generations_as_verl_dumps_them(tmp_path: Path) -> None:
    rows = ["user\n2 + 2?\nassistant\n"] * 2, ["4", "fünf"], ["4", None], [1.0, float("nan")], {"acc": [True, False]}
    _verl_function("_write_generations")(*rows, str(tmp_path / "dump"), 3)
    assert list(guess(tmp_path / "dump")) == ["verl"]
    assert imported("verl", tmp_path / "dump", tmp_path / "run").imported == 2
    one, other = sorted(rolltape.read(tmp_path / "run").rollouts(), key=lambda rollout: rollout.head.attempt)
    assert (one.head.step, one.reward, one.turns[0].reply.text) == (3, 1.0, "4")  # type: ignore[union-attr]
    assert other.reward != other.reward, "not a number, as verl wrote it"
    assert other.head.extra["acc"] is False


def _verl_function(name: str) -> Any:
    """A function of verl's trainer. The module itself imports what a GPU needs."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "trainer" / "ppo" / "ray_trainer.py"
    trainer = next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "RayPPOTrainer"
    )
    function = next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list = []
    names: dict[str, Any] = {"os": os, "json": json}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names[name]


def test_trajectories_as_harbor_writes_them(tmp_path: Path) -> None:
    made = harbor_trajectories().Trajectory.model_validate(trajectory())
    (tmp_path / "trajectory.json").write_text(json.dumps(made.to_json_dict()))
    assert imported("atif", tmp_path / "trajectory.json", tmp_path / "run").imported == 1
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    assert [turn.sampled_ids.tolist() for turn in rollout.turns] == [[10, 11], [12]]


def test_datasets_as_hugging_face_saves_them(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict  # type: ignore[import-untyped]

    rows = Dataset.from_list([{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, {**ANSWER, "content": "5"}]}])
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "split")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_json(tmp_path / "rows.jsonl")
    for number, path in enumerate(("one", "split", "rows.parquet", "rows.jsonl")):
        assert "messages" in guess(tmp_path / path), path
        imported("messages", tmp_path / path, tmp_path / f"run-{number}", source="sums")
        found = list(rolltape.read(tmp_path / f"run-{number}").rollouts())
        assert {one.turns[0].reply.text for one in found if one.turns[0].reply} == {"4", "5"}, path
    splits = {one.head.source for one in rolltape.read(tmp_path / "run-1").rollouts()}
    assert splits == {"sums#train", "sums#test"}, "each split is a source of its own"
    assert imported("messages", tmp_path / "split", tmp_path / "test", source="sums", split="test").imported == 2
    with pytest.raises(ImportFileError, match="it has no split 'dev'; it has train, test"):
        imported("messages", tmp_path / "split", tmp_path / "dev", split="dev")


@pytest.mark.parametrize("spoiled", ["data-00000-of-00001.arrow", "state.json", "dataset_info.json"])
def test_a_saved_dataset_that_is_cut_short_or_empty_is_named(tmp_path: Path, spoiled: str) -> None:
    from datasets import Dataset

    Dataset.from_list([{"messages": [QUESTION, ANSWER]}] * 50).save_to_disk(tmp_path / "saved")
    whole = (tmp_path / "saved" / spoiled).read_bytes()
    for length in (len(whole) // 2, 0):
        (tmp_path / "saved" / spoiled).write_bytes(whole[:length])
        with pytest.raises(ImportFileError, match="saved: not a readable saved dataset"):
            imported("messages", tmp_path / "saved", tmp_path / "run")
