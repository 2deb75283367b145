"""The page shows what the index holds: at any moment, after any change, and never more than the tape supports."""

import itertools
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import rolltape
from rolltape.records.rollout import EventKind, Rollout
from rolltape.samples.summary import summarize
from rolltape.tape.index import follower
from rolltape.tape.index.background import fill
from rolltape.tape.index.index import Index
from rolltape.tape.journal.entries import event_crc
from rolltape.view.rollout.rollout_answers import RolloutAnswers
from rolltape.view.run.state import RunState
from rolltape.view.served_runs import ServedRun
from taped import first_turn, next_turn, record_run
from viewing import answers_for, asking


def table(answers: RolloutAnswers) -> object:
    return {**answers.table({}, None), "snapshot": 0}, {**answers.overview(None), "snapshot": 0}


def test_what_was_indexed_is_what_would_be_found_again(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape:
        tape.score(ids[0], reward=float("inf"), by="somebody")
        tape.tag(ids[1], "good")
        tape.filter(ids[2], "no good")
    with answers_for(tmp_path / "run") as answers:
        expected = table(answers)
    again = RolloutAnswers(ServedRun("run", str(tmp_path / "run")))  # which reads nothing but the index
    assert table(again) == expected
    assert again.shown(again.row(ids[0], None)).rollout.reward == float("inf")
    shutil.rmtree(tmp_path / "run" / "cache")
    with answers_for(tmp_path / "run") as answers:
        assert table(answers) == expected


def test_a_page_that_meets_a_damaged_index_has_it_made_again(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    with answers_for(tmp_path / "run") as answers:
        expected = table(answers)
    (index,) = (tmp_path / "run" / "cache").glob("index-*.sqlite")
    with closing(sqlite3.connect(index)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ((page,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rollouts'").fetchall()
    with index.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(bytes(4096))
    ServedRun("run", str(tmp_path / "run")).state.refresh()
    with answers_for(tmp_path / "run") as answers:
        assert table(answers) == expected


def test_a_page_that_is_open_takes_in_what_came_since(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    with answers_for(tmp_path / "run") as answers:
        before = answers.table({}, None)
        with rolltape.open(tmp_path / "run") as tape:
            tape.score(ids[1], reward=9.0)
            with tape.rollout(task_id="later") as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=5.0)
        answers.run.catch_up(words=True)
        after = answers.table({}, None)
        assert [row["reward"] for row in after["rows"]] == [0.0, 9.0, 2.0, 5.0]
        assert after["progress"] == {"indexed": 4, "total": 4, "ended": 4, "summarized": 4, "searchable": 4}
        assert set(answers.run.state.changed_since(before["snapshot"])) == {ids[1], rollout.id}
        with answers_for(tmp_path / "run") as fresh:
            assert after["rows"] == fresh.table({}, None)["rows"]


def test_a_run_that_was_sealed_since_is_found_in_its_shards(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    with answers_for(tmp_path / "run") as answers:
        expected = table(answers)
        rolltape.seal(tmp_path / "run")
        answers.run.catch_up(words=True)
        assert table(answers) == expected
        assert answers.shown(answers.row(ids[0], None)).detail(None)["row"]["reward"] == 0.0


def test_pruned_turns_are_gone_from_the_summaries(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    rolltape.seal(tmp_path / "run")
    with answers_for(tmp_path / "run") as answers:
        rolltape.prune(tmp_path / "run", steps=[0])
        answers.run.catch_up(words=True)
        ledger = answers.overview(0)["ledger"]
    (rollout,) = rolltape.read(tmp_path / "run").rollouts(step=0)
    assert ledger == {fate.value: tokens for fate, tokens in rolltape.linearize(rollout).ledger.totals().items()}
    assert list(ledger) == ["dropped:pruned"]


def test_nothing_is_written_into_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")
    (tmp_path / "run" / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    # Not by its mode: a test may run as one who writes everywhere.
    run = tmp_path / "run"
    monkeypatch.setattr(os, "access", lambda path, mode: run not in Path(path).parents)
    with answers_for(run) as answers:
        assert answers.table({}, None)["total"] == 3
    assert list((run / "cache").iterdir()) == []
    with answers_for(run) as answers:
        assert answers.table({}, answers.search("hello")())["matched"] == 3


def test_an_index_of_a_run_that_was_here_before_is_made_again(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    with answers_for(tmp_path / "run"):
        pass
    for name in ("journals", "run.json"):
        target = tmp_path / "run" / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    record_run(tmp_path / "run", rollouts=1)
    with answers_for(tmp_path / "run") as answers:
        assert answers.table({}, None)["total"] == 1


def test_before_anything_is_indexed_the_page_says_how_much_there_is_and_claims_nothing(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=2, summaries=False)
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="runs")
        first_turn(rollout.session())
        answers = RolloutAnswers(ServedRun("run", str(tmp_path / "run")))
        overview = answers.overview(None)
        assert overview["progress"] == {"indexed": 0, "total": 3, "ended": 0, "summarized": 0, "searchable": 0}
        assert not overview["read_through"]
        assert (overview["rollouts"], overview["statuses"], overview["problems"]) == (0, {}, 0)
        answers.run.index.advance()
        overview = answers.overview(None)
        progress = {"indexed": 3, "total": 3, "ended": 2, "summarized": 0, "searchable": 0}
        assert (overview["progress"], overview["read_through"], overview["pending"]) == (progress, True, 2)
        assert answers.table({}, None)["progress"] == answers.headline()["progress"] == progress
        assert [row["trained_tokens"] for row in answers.table({}, None)["rows"]] == [None, None, None]


async def test_the_first_opening_of_a_healthy_run_never_calls_a_rollout_lost_or_unrewarded(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=40, turns=1)
    async with asking(tmp_path / "run") as ask:
        seen: list[dict[str, int]] = []
        while not seen or seen[-1]["indexed"] < 40 or seen[-1]["summarized"] < 40:
            overview = await ask.json("/api/exp/overview")
            rows = (await ask.json("/api/exp/rollouts"))["rows"]
            assert overview["statuses"] in ({}, {"finished": overview["rollouts"]})
            assert {(row["status"], row["reward"] is None, row["problems"]) for row in rows} <= {("finished", False, 0)}
            assert overview["problems"] == 0
            assert overview["progress"]["indexed"] == overview["rollouts"]
            assert overview["progress"]["total"] == 40
            seen.append(overview["progress"])


def test_the_index_may_grow_at_any_reading_within_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that was read before the first rollouts was asked for rows that came right after."""
    record_run(tmp_path / "run", rollouts=0)
    run = ServedRun("run", str(tmp_path / "run"))
    read, attempts = RunState.refresh, itertools.count()

    def refresh(state: RunState) -> bool:
        known = read(state)
        attempt = next(attempts)
        with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="task", attempt=attempt) as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=1.0)
        run.index.advance()
        return known

    monkeypatch.setattr(RunState, "refresh", refresh)
    with closing(run):
        answers = RolloutAnswers(run)
        assert answers.table({}, None)["rows"] == []
        assert len(b"".join(answers.export({"form": "csv"}, None)()).splitlines()) == 1 + 1
        rows = answers.table({}, None)["rows"]
        assert len(rows) == 2
        assert answers.shown(answers.row(rows[0]["id"], None)).row["id"] == rows[0]["id"]
        assert answers.conversation(answers.row(rows[0]["id"], None))()["left_out"] == 0
        group = answers.group(rows[0]["group"])()
        assert len(group["rollouts"]) == group["attempts"] == 5


@pytest.mark.parametrize("moment", ["pin", "cut", "read", "write"])
def test_a_rollout_that_comes_while_the_follower_reads_is_shown_whole_or_not_yet(tmp_path: Path, moment: str) -> None:
    """A session that was committed between two of its reads was called missing, and its rollout lost."""
    ids = record_run(tmp_path / "run", rollouts=1)
    with rolltape.open(tmp_path / "run") as tape:
        rollout = tape.rollout(task_id="first")
        first_turn(rollout.session())

        def append(what: str) -> None:
            if what.startswith(moment) and len(ids) < 4:
                with tape.rollout(task_id=f"later {len(ids)}") as later:
                    session = later.session()
                    next_turn(session, first_turn(session))
                    later.finish(reward=1.0)
                    ids.append(later.id)

        run = ServedRun("run", str(tmp_path / "run"))
        answers, index = RolloutAnswers(run), run.index
        index._follower._stop = append
        for _ in range(4):
            index.advance()
            fill(index, summarize)
            for row in answers.table({}, None)["rows"]:
                assert row["status"] == ("running" if row["id"] == rollout.id else "finished")
                assert row["problems"] == 0
                assert row["id"] == rollout.id or row["trained_tokens"] > 0
            assert answers.overview(None)["problem_list"] == []
        assert len(ids) == 4
        assert answers.table({}, answers.search("hello")())["matched"] == 5  # the one that runs, too
        run.close()


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_scores_in_the_same_nanosecond_the_same_one_counts_in_any_order_of_arrival(
    tmp_path: Path, first: int
) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1)
    known = set((tmp_path / "run" / "journals").iterdir())
    for reward in (0.0, 1.0):
        with rolltape.open(tmp_path / "run") as tape:
            tape.score(rollout_id, reward=reward)
    journals = sorted(set((tmp_path / "run" / "journals").glob("*.sqlite")) - known)
    for path in journals:  # one writer after the other would say a later time
        with closing(sqlite3.connect(path)) as connection, connection:
            ((body,),) = connection.execute("SELECT body FROM events").fetchall()
            body = re.sub(rb'"at_ns":\d+', b'"at_ns":%d' % 2**62, body)
            connection.execute("UPDATE events SET body = ?, crc = ?", (body, event_crc(0, body)))
    late = journals[1 - first].rename(tmp_path / journals[1 - first].name)
    with answers_for(tmp_path / "run") as answers:
        late.rename(journals[1 - first])
        answers.run.catch_up(words=False)
        rollout = rolltape.read(tmp_path / "run").rollout(rollout_id)
        scores = [event for event in rollout.events if event.kind == EventKind.SCORE and event.at_ns == 2**62]
        assert [event.writer for event in scores] == [path.stem for path in journals]
        assert answers.table({}, None)["rows"][0]["reward"] == scores[1].data["reward"] == rollout.reward


def test_what_cannot_be_read_is_said_and_not_read_again_until_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run", summaries=False)
    asked: list[object] = []

    def broken(index: Index, key: object) -> None:
        asked.append(key)
        raise RecursionError("too deep")

    with monkeypatch.context() as patched:
        patched.setattr(Index, "load_with_problems", broken)
        with answers_for(tmp_path / "run") as answers:  # which would not end
            overview = answers.overview(None)
            assert (overview["rollouts"], overview["pending"], overview["problems"]) == (3, 0, 3)
            assert "too deep" in overview["problem_list"][0]
            answers.run.catch_up(words=True)
            assert len(asked) == 3
            assert answers.table({}, answers.search("hello")())["search"] == {"searched": 0, "total": 3}
    rolltape.seal(tmp_path / "run")
    with answers_for(tmp_path / "run") as answers:
        assert [row["trained_tokens"] for row in answers.table({}, None)["rows"]] == [8, 8, 8]
        assert answers.overview(None)["problems"] == 0


def test_what_is_sealed_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    run = ServedRun("run", str(tmp_path / "run"))
    run.index.advance()
    rolltape.seal(tmp_path / "run")
    fill(run.index, summarize)  # as it was known: the journal is gone
    answers = RolloutAnswers(run)
    assert [row["trained_tokens"] for row in answers.table({}, None)["rows"]] == [8, 8, 8]
    assert answers.overview(None)["problem_list"] == []
    run.close()


def test_a_summary_that_was_made_while_something_was_said_is_made_again(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=1, summaries=False)
    rolltape.seal(tmp_path / "run")
    run = ServedRun("run", str(tmp_path / "run"))
    run.index.advance()
    made: list[Rollout] = []

    def slow(rollout: Rollout) -> object:
        made.append(rollout)
        if len(made) == 1:
            rolltape.prune(tmp_path / "run", steps=[0])
            run.index.advance()
        return summarize(rollout)

    fill(run.index, slow)  # type: ignore[arg-type]
    assert len(made) == 2
    assert list(RolloutAnswers(run).overview(None)["ledger"]) == ["dropped:pruned"]
    run.close()


def test_two_processes_that_fill_an_index_come_to_the_same(tmp_path: Path) -> None:
    record_run(tmp_path / "run", rollouts=6)
    first, second = ServedRun("run", str(tmp_path / "run")), ServedRun("run", str(tmp_path / "run"))
    first.index.advance()

    def at_the_same_time(rollout: Rollout) -> object:
        if not second.state.progress.summarized:
            second.catch_up(words=True)
        return summarize(rollout)

    fill(first.index, at_the_same_time)  # type: ignore[arg-type]
    answers = RolloutAnswers(first)
    assert [row["trained_tokens"] for row in answers.table({}, None)["rows"]] == [8] * 6
    assert answers.table({}, answers.search("hello")())["matched"] == 6
    with closing(sqlite3.connect(str(first.index.file.path))) as connection:
        assert connection.execute("SELECT count(*) FROM summaries").fetchone() == (6,)
    for run in (first, second):
        run.close()


def test_progress_counts_each_rollout_once_also_while_many_are_indexed_or_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_PIECE", 3)
    record_run(tmp_path / "run", rollouts=10, turns=1)
    run = ServedRun("run", str(tmp_path / "run"))
    answers, index = RolloutAnswers(run), run.index
    seen: list[tuple[int, int]] = []

    def look(what: str) -> None:
        overview = answers.overview(None)
        assert overview["rollouts"] == overview["progress"]["indexed"]
        assert overview["read_through"] == (len(seen) > 0 and overview["progress"]["indexed"] == 10)
        seen.append((overview["progress"]["indexed"], overview["progress"]["total"]))

    index._follower._stop = look
    index.advance()
    assert sorted(set(seen)) == [(0, 10), (3, 10), (6, 10)]
    index._follower._stop = lambda what: None
    index.advance()
    rolltape.seal(tmp_path / "run")
    index._follower._stop = look
    index.advance()
    assert set(seen[-5:]) == {(10, 10)}
    run.close()
