"""What cannot be read is said, stays said, and everything else is shown."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

import rolltape
from rolltape.records.rollout import EventKind
from rolltape.tape.journal.entries import encode_event
from taped import first_turn, record_run
from viewing import answers_for, asking


def _journal(run: Path) -> Path:
    (path,) = (run / "journals").glob("*.sqlite")
    return path


def _spoil_turn(run: Path) -> None:
    with sqlite3.connect(_journal(run)) as connection:
        connection.execute("UPDATE turns SET facts = x'00' WHERE pk = (SELECT pk FROM turns LIMIT 1 OFFSET 2)")


def _spoil_head(run: Path) -> None:
    with sqlite3.connect(_journal(run)) as connection:
        connection.execute("UPDATE rollouts SET head = x'00' WHERE pk = 2")


def _add_nonsense(run: Path) -> None:
    (run / "journals" / "another.sqlite").write_bytes(b"nonsense" * 1000)


def _spoil_published(run: Path) -> None:
    (run / "published.json").write_text("{nonsense")


def _spoil_shard(run: Path) -> None:
    rolltape.seal(run)
    (shard,) = (run / "shards").iterdir()
    contents = bytearray((shard / "contents.parquet").read_bytes())
    contents[len(contents) // 3 : len(contents) // 3 + 60] = b"\xff" * 60
    (shard / "contents.parquet").write_bytes(contents)


@pytest.mark.parametrize(
    ("spoil", "said", "rollouts"),
    [
        (_spoil_turn, "has a gap before turn 3", 3),
        (_spoil_head, "row 2 of rollouts is damaged", 2),
        (_add_nonsense, "another.sqlite", 3),
        (_spoil_published, "published.json: cannot be read", 3),
        (_spoil_shard, "is missing; lost: session", 3),
    ],
)
async def test_damage_is_said_and_the_rest_is_shown(tmp_path: Path, spoil: object, said: str, rollouts: int) -> None:
    ids = record_run(tmp_path / "run", summaries=False)
    assert callable(spoil)
    spoil(tmp_path / "run")
    for _ in range(2):  # with a cache it is known as well
        async with asking(tmp_path / "run") as ask:
            overview = await ask.caught_up("exp")
            assert overview["rollouts"] == rollouts
            assert overview["problems"] == len(overview["problem_list"]) > 0
            assert any(said in one for one in overview["problem_list"])
            assert (await ask.json("/api/runs"))["runs"][0]["problems"] == overview["problems"]
            assert (await ask.json(f"/api/exp/rollouts/{ids[2]}"))["row"]["reward"] == 2.0


def test_a_rollout_says_what_of_it_is_lost(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run", summaries=False)
    _spoil_turn(tmp_path / "run")
    with answers_for(tmp_path / "run") as answers:
        rows = [answers.row(one, None) for one in ids[:2]]
        assert [answers.listing().row(row)["problems"] > 0 for row in rows] == [True, False]
        told = [answers.shown(row).detail(None)["problems"] for row in rows]
        assert any("lost: turn" in one for one in told[0])
        assert told[1] == []


async def test_a_run_that_is_deleted_while_it_is_served_is_said_to_be_gone(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    async with asking(tmp_path / "run") as ask:
        await ask.caught_up("exp")
        (tmp_path / "run").rename(tmp_path / "deleted")  # at once: a file that is made meanwhile would stop `rmtree`
        overview = await ask.until("/api/exp/overview", lambda one: one["problems"])
        assert "no longer there" in overview["problem_list"][0]
        assert (await ask.json("/api/exp/rollouts"))["total"] == 3
        assert (await ask.refused(f"/api/exp/rollouts/{ids[0]}"))[0] == 404


def test_a_statement_that_makes_no_sense_costs_that_statement_alone(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape:
        # The tape itself would refuse the first one.
        tape._writer.journal().append(encode_event(EventKind.SCORE, (ids[0], 0), {"no": "reward"}))
        tape.append_event(EventKind.TAG, ids[1], {"tags": None})
        tape.filter(ids[2], "no good")
    with answers_for(tmp_path / "run") as answers:
        rows = answers.table({}, None)["rows"]
        assert [(row["reward"], row["filter"]) for row in rows] == [(0.0, None), (1.0, None), (2.0, "no good")]
        told = answers.overview(None)["problem_list"]
        assert [any(one in text for text in told) for one in ids] == [True, True, False]


async def test_a_run_that_is_deleted_and_recorded_again_is_shown_as_it_is_now(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (first, *_) = record_run(run)
    async with asking(run) as ask, ask.client.get("/api/exp/live") as events:
        before = await ask.caught_up("exp")
        assert "turns" in str(await ask.json(f"/api/exp/rollouts/{first}"))
        run.rename(tmp_path / "deleted")  # at once: a file that is made meanwhile would stop `rmtree`
        gone = await ask.until("/api/exp/overview", lambda one: one["problems"] == 1)
        assert (gone["rollouts"], gone["live"]) == (before["rollouts"], False)
        assert "the run is no longer there; the page shows what was read before" in gone["problem_list"][0]
        assert not run.exists()  # nobody makes an index where no run is

        with rolltape.open(run, name="another") as tape, tape.rollout(task_id="other") as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=-3.0)
        now = await ask.until("/api/exp/overview", lambda one: one["name"] == "another" and one["read_through"])
        assert (now["rollouts"], now["reward"]["mean"], now["problems"]) == (1, -3.0, 0)
        assert now["snapshot"] > before["snapshot"]  # pages that are open ask again
        assert (await ask.json(f"/api/exp/rollouts/{rollout.id}"))["row"]["task"] == "other"
        assert (await ask.refused(f"/api/exp/rollouts/{first}"))[0] == 404
        async with asyncio.timeout(60):
            while rollout.id not in (await events.content.readuntil(b"\n\n")).decode():
                pass
