"""What is said after the fact: it may come late, from another process, and be revised; the latest counts."""

from pathlib import Path

import pytest

import rolltape
from rolltape.errors import NoSuchRollout
from rolltape.records.rollout import EventKind
from rolltape.records.turn import Delivery
from taped import finished, first_turn, python, record_run, record_session

JUDGE = """
import sys, rolltape
with rolltape.open(sys.argv[1]) as tape:
    tape.score(sys.argv[2], reward=float(sys.argv[3]), by="judge " + sys.argv[3], terms={"style": 0.5})
"""


def test_a_late_reward_from_another_process_counts_and_the_history_stays(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    for reward in ("0.25", "0.75"):
        finished(python(JUDGE, str(tmp_path / "run"), ids[1], reward))
    read = rolltape.read(tmp_path / "run").rollout(ids[1])
    assert (read.reward, read.outcome.rewarded_by, read.outcome.reward_terms) == (0.75, "judge 0.75", {"style": 0.5})
    assert [event.data["reward"] for event in read.events if event.kind == EventKind.SCORE] == [1.0, 0.25, 0.75]
    assert [row.outcome.reward for row in rolltape.read(tmp_path / "run").index()] == [0.0, 0.75, 2.0]


def test_a_late_reward_survives_sealing_before_and_after(tmp_path: Path) -> None:
    (rollout,) = record_run(tmp_path / "run", rollouts=1)
    finished(python(JUDGE, str(tmp_path / "run"), rollout, "0.25"))
    assert len(rolltape.seal(tmp_path / "run").removed) == 2
    finished(python(JUDGE, str(tmp_path / "run"), rollout, "0.5"))
    assert rolltape.read(tmp_path / "run").rollout(rollout).reward == 0.5
    report = rolltape.seal(tmp_path / "run")
    assert (report.rollouts, len(report.removed)) == (0, 1)
    read = rolltape.read(tmp_path / "run").rollout(rollout)
    assert [event.data["reward"] for event in read.events if event.kind == EventKind.SCORE] == [0.0, 0.25, 0.5]
    assert rolltape.seal(tmp_path / "run").shards == ()


def test_deliveries_turn_rewards_filters_and_tags_apply(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="a", tags=["x"]) as rollout:
        turn = first_turn(rollout.session(), delivery="unknown", reward=0.0)
        rollout.finish(reward=1.0)
        tape.deliver(turn.id, Delivery.UNDELIVERED)
        tape.deliver(turn.id, "delivered")
        tape.score(rollout.id, reward=0.5, turn=turn.id)
        tape.filter(rollout.id, "too easy")
        tape.tag(rollout.id, "y", "z")
        read = tape.run().rollout(rollout.id)
        assert (read.turns[0].facts.delivery, read.turns[0].facts.reward) == (Delivery.DELIVERED, 0.5)
        assert (read.reward, read.outcome.filtered, read.outcome.tags) == (1.0, "too easy", ("y", "z"))
        tape.filter(rollout.id, None)
        assert tape.run().rollout(rollout.id).outcome.filtered is None


def test_a_score_without_a_try_is_about_the_latest(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for new_try in (False, True):
            with tape.rollout(task_id="a", new_try=new_try) as rollout:
                rollout.finish(reward=0.0)
        tape.score(rollout.id, reward=1.0)
        tape.score(rollout.id, reward=0.5, try_index=0)
        assert [tape.run().rollout(rollout.id, index).reward for index in (0, 1)] == [0.5, 1.0]


def test_versions_come_as_announced_then_as_they_appear(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        with tape.rollout(task_id="a") as rollout:
            record_session(rollout, 2)
            rollout.finish()
        running = tape.rollout(task_id="b")
        first_turn(running.session(), weight_version=("1", "9"))
        tape.announce_version("10")
        tape.announce_version(8)
        assert tape.run().versions() == ("10", "8", "7", "1", "9")
        running.finish()
    rolltape.seal(tmp_path / "run")
    assert rolltape.read(tmp_path / "run").versions() == ("10", "8", "7", "1", "9")


def test_a_rollout_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", rollouts=20, turns=1)
    run = rolltape.read(tmp_path / "run")
    assert run.rollout(ids[0][:12]).id == ids[0]
    with pytest.raises(NoSuchRollout, match="holds no rollout 'zz'; it has 20"):
        run.rollout("zz")
    shared = next(first[:1] for first in ids if sum(one[0] == first[0] for one in ids) > 1)
    with pytest.raises(NoSuchRollout, match=f"'{shared}' begins"):
        run.rollout(shared)
    with pytest.raises(NoSuchRollout, match="has no try 4; it has 0"):
        run.rollout(ids[0], try_index=4)
    assert [one.id for one in run.rollouts(step=3)] == [ids[3]]
    assert [one.id for one in run.rollouts(task_id="task-5")] == [ids[5]]
    assert [one.id for one in run.rollouts(group=run.rollout(ids[7]).head.group)] == [ids[7]]
