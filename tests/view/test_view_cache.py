"""What is kept beside a run: used when it holds, made again when it does not, and never needed."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

import rolltape
from rolltape.records.rollout import EventKind
from rolltape.view import cachefile, reading
from rolltape.view.catching_up import catch_up
from rolltape.view.following import Follower
from rolltape.view.loading import Loader
from rolltape.view.reports import Derived, Said, Spot, Started
from rolltape.view.rows import NOT_DERIVED
from rolltape.view.service import RunAnswers
from rolltape.view.summary import Summary
from rolltape.view.watching import WatchedRun
from taped import first_turn, record_run
from viewing import answers_for


def kept(path: Path) -> WatchedRun:
    """A run that was caught up with and written down."""
    run = WatchedRun("run", str(path))
    catch_up(run, search=True)
    write = run.to_keep()
    assert write is not None
    write()
    return run


def table(run: WatchedRun) -> object:
    answers = RunAnswers(run)
    return {**answers.table({}, None), "snapshot": 0}, {**answers.overview(None), "snapshot": 0, "read_through": True}


def test_what_was_kept_is_what_would_be_found_again(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape:
        tape.score(ids[0], reward=float("inf"), by="somebody")
        tape.tag(ids[1], "good")
        tape.filter(ids[2], "no good")
    run = kept(tmp_path / "run")
    again = WatchedRun("run", str(tmp_path / "run"))
    assert len(again.state.rows) == 3
    assert table(again) == table(run)
    # Nothing is left to be told.
    told = list(Follower(again.location, again.state.marks).look())
    assert [type(report).__name__ for report in told] == ["Looked"]
    assert again.state.wanted(10, search=True) == []
    row = again.state.rows.row_of[ids[0], 0]
    assert RunAnswers(again)._loading(row)().reward == float("inf")


def test_only_what_came_since_is_read(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    kept(tmp_path / "run")
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="later") as rollout:
        first_turn(rollout.session())
        rollout.finish(reward=5.0)
    again = WatchedRun("run", str(tmp_path / "run"))
    told = list(Follower(again.location, again.state.marks).look())
    assert [report.key[0] for report in told if isinstance(report, Started)] == [rollout.id]
    catch_up(again, search=True)
    with answers_for(tmp_path / "run") as fresh:
        assert table(again)[0]["rows"] == fresh.table({}, None)["rows"]  # type: ignore[index]


def test_a_cache_that_is_deleted_or_damaged_or_of_another_run_is_made_again(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    run = kept(tmp_path / "run")
    expected = table(run)
    cache = run.cache
    whole = cache.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2], whole[:-8] + b"deadbeef"):
        cache.write_bytes(content)
        again = WatchedRun("run", str(tmp_path / "run"))
        assert len(again.state.rows) == 0
        catch_up(again, search=True)
        assert table(again) == expected
    shutil.rmtree(cache.parent)
    with answers_for(tmp_path / "run") as answers:
        assert answers.table({}, None)["total"] == 3
    # The run is recorded anew at the same place; what was known of the old one is of no use.
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(whole)
    for name in ("journals", "run.json"):
        target = tmp_path / "run" / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    record_run(tmp_path / "run", rollouts=1)
    with answers_for(tmp_path / "run") as answers:
        assert answers.table({}, None)["total"] == 1


def test_a_run_that_was_sealed_since_is_found_in_its_shards(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    expected = table(kept(tmp_path / "run"))
    rolltape.seal(tmp_path / "run")
    again = WatchedRun("run", str(tmp_path / "run"))
    catch_up(again, search=True)
    assert table(again) == expected
    place, _ = again.state.whereabouts(again.state.rows.row_of[ids[0], 0])
    assert place.source.startswith("shard/")


def test_pruned_turns_are_gone_from_the_summaries(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    rolltape.seal(tmp_path / "run")
    kept(tmp_path / "run")
    rolltape.prune(tmp_path / "run", steps=[0])
    again = WatchedRun("run", str(tmp_path / "run"))
    catch_up(again, search=True)
    ledger = RunAnswers(again).overview(0)["ledger"]
    (rollout,) = rolltape.read(tmp_path / "run").rollouts(step=0)
    assert ledger == {fate.value: tokens for fate, tokens in rolltape.linearize(rollout).ledger.totals().items()}
    assert list(ledger) == ["dropped:pruned"]


def test_nothing_is_written_into_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")
    (tmp_path / "run" / "cache").mkdir()
    # Not by its mode: a test may run as one who writes everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: tmp_path not in Path(path).parents)
    kept(tmp_path / "run").close()
    assert list((tmp_path / "run" / "cache").iterdir()) == []


def test_what_somebody_else_keeps_of_a_run_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(tmp_path / "run")
    expected = table(kept(tmp_path / "run"))
    monkeypatch.setattr(os, "access", lambda path, mode: tmp_path not in Path(path).parents)
    again = WatchedRun("run", str(tmp_path / "run"))
    assert table(again) == expected
    answers = RunAnswers(again)
    assert answers.table({}, answers.search("hello")())["matched"] == 3
    again.close()


def test_where_no_folder_can_be_made_a_temporary_one_serves(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    (tmp_path / "run" / "cache").write_text("in the way")
    run = kept(tmp_path / "run")
    assert run.cache.exists()
    assert not run.cache.is_relative_to(tmp_path)
    assert RunAnswers(run).row(ids[0], None) == 0
    folder = run.cache.parent
    run.close()
    assert not folder.exists()


def test_the_cache_is_named_after_the_policy_and_its_version(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    run = kept(tmp_path / "run")
    assert run.policy.key in run.cache.name
    other = msgspec.structs.replace(run.policy, train_abandoned=True)
    assert other.key not in run.cache.name


def test_a_cache_whose_numbers_stand_for_other_things_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_run(tmp_path / "run")
    monkeypatch.setattr(cachefile, "_CODES", ["an", "older", "version"])
    kept(tmp_path / "run")
    monkeypatch.undo()
    assert len(WatchedRun("run", str(tmp_path / "run")).state.rows) == 0


def test_a_summary_that_was_on_its_way_when_something_was_said_is_asked_for_again(tmp_path: Path) -> None:
    (rollout_id,) = record_run(tmp_path / "run", rollouts=1)
    run = kept(tmp_path / "run")
    row = run.state.rows.row_of[rollout_id, 0]
    run.state.rows.columns.set(row, derived=NOT_DERIVED)
    (asked,) = run.state.wanted(10, search=False)
    turns = {"sampled_tokens": 0, "turns": [], "status": "finished"}
    spot = Spot("another", 0, asked.place.source, 0)
    run.state.apply(Said((rollout_id, 0), EventKind.PRUNE, 2**62, "another", turns, spot))
    run.state.apply(Derived((rollout_id, 0), Summary(branches=1, samples=1, forks={}, ledger={}), None))
    assert [one.key for one in run.state.wanted(10, search=False)] == [(rollout_id, 0)]


def test_what_cannot_be_read_is_not_asked_for_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(tmp_path / "run")

    def broken(*_: object, **__: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(Loader, "load", broken)
    with answers_for(tmp_path / "run") as answers:  # which would not end
        overview = answers.overview(None)
        assert (overview["rollouts"], overview["pending"], overview["problems"]) == (3, 0, 3)
        assert "too deep" in overview["problem_list"][0]


@pytest.mark.parametrize("seen_first", ["what was read", "the shard"])
def test_what_is_sealed_while_it_is_read_is_read_again(tmp_path: Path, seen_first: str) -> None:
    record_run(tmp_path / "run")
    run = WatchedRun("run", str(tmp_path / "run"))
    follower = Follower(run.location)
    worker = reading.Reading(run.location, run.folder.path, run.policy, run.folder.created)

    def look() -> None:
        for report in follower.look():
            run.state.apply(report)

    look()
    wanted = run.state.wanted(10, search=False)
    rolltape.seal(tmp_path / "run")
    told = list(worker.read(wanted))
    assert [one.summary for one in told] == [None, None, None]  # the journal is gone
    if seen_first == "the shard":
        look()
    for derived in told:
        run.state.apply(derived)
    look()
    for derived in worker.read(run.state.wanted(10, search=False)):
        run.state.apply(derived)
    assert [row["trained_tokens"] for row in RunAnswers(run).table({}, None)["rows"]] == [8, 8, 8]
    assert run.state.all_problems() == []
