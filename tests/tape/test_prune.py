"""Pruning: turns or a side array go, the rest stays, the tape says so, and nobody takes it for damage."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from rolltape.errors import RecordError, TapeError
from rolltape.records.rollout import EventKind
from rolltape.tape.rundir import Place
from taped import first_turn, next_turn, record_run, record_session, spelled_turn


def test_turns_of_earlier_steps_go_and_heads_outcomes_and_counts_stay(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", rollouts=4, turns=5)
    run = rolltape.read(tmp_path / "run")
    before = run.index()
    report = rolltape.prune(tmp_path / "run", before_step=2)
    assert (report.pruned, report.rollouts, report.turns, report.sampled_tokens) == ("turns", 2, 10, 28)
    after = run.index()
    assert [(row.head, row.outcome, row.turns, row.sampled_tokens) for row in after] == [
        (row.head, row.outcome, row.turns, row.sampled_tokens) for row in before
    ]
    assert [row.pruned for row in after] == [("turns",), ("turns",), (), ()]
    assert [len(run.rollout(one).turns) for one in ids] == [0, 0, 5, 5]
    assert run.problems() == []
    assert run.verify_shards() == []
    (event,) = [one for one in run.rollout(ids[0]).events if one.kind == EventKind.PRUNE]
    assert event.data == {"pruned": "turns", "turns": 5, "sampled_tokens": 14}
    assert rolltape.prune(tmp_path / "run", before_step=2).rollouts == 0
    assert rolltape.prune(tmp_path / "run", steps=[3]).rollouts == 1
    assert [len(run.rollout(one).turns) for one in ids] == [0, 0, 5, 0]


def test_a_summary_is_outdated_by_a_prune_also_if_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
        record_run(tmp_path / "run", rollouts=1)
    run = rolltape.read(tmp_path / "run")
    query = "SELECT count(*) FROM summaries"
    run.index()
    assert run.tape_index.ask(lambda connection: connection.execute(query).fetchone()) == (1,)
    rolltape.prune(tmp_path / "run", steps=[0])
    run.index()
    assert run.tape_index.ask(lambda connection: connection.execute(query).fetchone()) == (0,)


def test_pruning_frees_bytes_and_unknown_manifest_keys_survive(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with rolltape.open(tmp_path / "run") as tape:
        for step in range(3):
            with tape.rollout(task_id="a", step=step) as rollout:
                first_turn(rollout.session(), prompt_ids=rng.integers(0, 151_000, 50_000))
                rollout.finish(reward=1.0)
    rolltape.seal(tmp_path / "run")
    (manifest,) = (tmp_path / "run" / "shards").glob("*/MANIFEST.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "colour": "green"}))
    report = rolltape.prune(tmp_path / "run", steps=[0, 1])
    assert report.bytes_freed > 150_000
    (manifest,) = (tmp_path / "run" / "shards").glob("*/MANIFEST.json")
    assert json.loads(manifest.read_text())["colour"] == "green"


def test_a_prune_cut_short_before_it_removed_anything_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = record_run(tmp_path / "run")
    rolltape.seal(tmp_path / "run")

    def dies(place: Place, shard: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Place, "remove_shard", dies)
        with pytest.raises(KeyboardInterrupt):
            rolltape.prune(tmp_path / "run", before_step=2)
    shards = tmp_path / "run" / "shards"
    assert len(list(shards.iterdir())) == 2
    rolltape.prune(tmp_path / "run", before_step=2)
    assert len(list(shards.iterdir())) == 1
    run = rolltape.read(tmp_path / "run")
    assert [len(run.rollout(one).turns) for one in ids] == [0, 0, 4]


def test_a_place_out_of_reach_is_said_to_be_skipped(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    (tmp_path / "run" / "published.json").write_text(json.dumps({"locations": ["nope://bucket/exp"]}))
    report = rolltape.prune(tmp_path / "run", before_step=2)
    assert report.rollouts == 2
    assert list(report.skipped) == ["nope://bucket/exp"]


def test_one_side_array_goes_and_everything_else_stays(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a") as rollout:
        session = rollout.session()
        turn = first_turn(session, side_arrays={"experts": [[1], [2]], "top": [0.5, 0.25]})
        next_turn(session, turn)
        rollout.finish(reward=1.0)
    run = rolltape.read(tmp_path / "run")
    before = [spelled_turn(one) for one in run.rollout(rollout.id).turns]
    report = rolltape.prune(tmp_path / "run", side_array="experts")
    assert (report.pruned, report.rollouts) == ("side array experts", 1)
    after = run.rollout(rollout.id).turns
    assert set(after[0].side) == {"top"}
    for turn_before in before:
        turn_before["side"].pop("experts", None)
    assert [spelled_turn(one) for one in after] == before
    assert run.index()[0].pruned == ("side array experts",)
    assert run.problems() == []
    assert rolltape.prune(tmp_path / "run", side_array="nothing").rollouts == 0


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=3, turns=2)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.sqlite")}
    report = rolltape.prune(tmp_path / "run", before_step=2, dry_run=True)
    assert (report.rollouts, report.turns, report.dry_run, report.bytes_freed) == (2, 4, True, 0)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.sqlite")} == files
    assert not (tmp_path / "run" / "shards").exists()


def test_a_live_writers_rollouts_are_skipped_and_said(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=2, turns=2)
    tape = rolltape.open(tmp_path / "run")
    with tape.rollout(task_id="mine", step=0) as rollout:
        record_session(rollout, 3)
        rollout.finish()
    report = rolltape.prune(tmp_path / "run", before_step=5)
    assert report.rollouts == 2
    assert report.skipped == {f"{rollout.id} (try 0)": f"its writer {tape.writer} is alive"}
    assert len(tape.run().rollout(rollout.id).turns) == 3
    tape.close()
    assert rolltape.prune(tmp_path / "run", before_step=5).rollouts == 1
    assert [row.pruned for row in rolltape.read(tmp_path / "run").index()] == [("turns",)] * 3


def test_published_shards_are_pruned_too(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", rollouts=2)
    target = f"memory://pruned/{tmp_path.name}"
    rolltape.seal(tmp_path / "run", to=target)
    rolltape.prune(tmp_path / "run", steps={0})
    remote = rolltape.read(target)
    assert [len(remote.rollout(one).turns) for one in ids] == [0, 4]
    assert remote.problems() == []


def test_pruning_nothing_in_particular_is_refused(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=1)
    with pytest.raises(TapeError, match="nothing to prune"):
        rolltape.prune(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 5}, "steps are 5, a int; give a list of steps"),
        ({"steps": ["x"]}, "steps is 'x'; give a whole number from 0 up"),
        ({"before_step": "x"}, "before_step is 'x'; give a whole number from 0 up"),
    ],
)
def test_steps_that_are_none_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    record_run(tmp_path / "run", rollouts=1)
    with pytest.raises(RecordError, match=said):
        rolltape.prune(tmp_path / "run", **options)
