"""Foreign ids: what other programs call a rollout is kept with it, and finds it."""

from pathlib import Path

import pytest

import rolltape
from rolltape.errors import AmbiguousId, NoSuchRollout, RecordError
from rolltape.tape.rundir import Place
from rolltape.tape.shards.publish import publish_left
from rolltape.tape.shards.seal import make_run
from taped import record_run


def record(run: Path, *foreign: list[str], task_id: str = "t") -> list[str]:
    ids = []
    with rolltape.open(run, name="exp") as tape:
        for attempt, names in enumerate(foreign):
            rollout = tape.rollout(task_id=task_id, attempt=attempt, foreign_ids=names)
            rollout.finish(reward=float(attempt))
            ids.append(rollout.id)
    return ids


def check(run: Path | str, ids: list[str]) -> None:
    """What `record(run, ["a", "b"], ["c"])` wrote is found."""
    read = rolltape.read(run)
    assert [read.rollout(name).id for name in ("a", "b", "c", ids[1])] == [ids[0], ids[0], ids[1], ids[1]]
    assert [row.head.foreign_ids for row in read.index()] == [("a", "b"), ("c",)]


def test_a_rollout_is_found_by_each_of_its_foreign_ids(tmp_path: Path) -> None:
    check(tmp_path, record(tmp_path, ["a", "b", "a"], ["c"]))


def test_they_are_kept_when_rollouts_are_sealed_and_when_the_index_is_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ids = record(run, ["a", "b"], ["c"])
    rolltape.read(run).rollout("a")
    rolltape.seal(run)
    check(run, ids)
    for path in (run / "cache").iterdir():
        path.unlink()
    check(run, ids)


def test_they_are_kept_in_published_shards(tmp_path: Path) -> None:
    ids = record(tmp_path / "run", ["a", "b"], ["c"])
    place = Place(tmp_path / "far")
    with rolltape.open(tmp_path / "run") as tape:
        make_run(place, tape.directory)
        publish_left(tape.directory, place)
    check(place.url, ids)


def test_a_rollout_that_another_process_goes_on_with_keeps_them(tmp_path: Path) -> None:
    with rolltape.open(tmp_path, name="exp") as first:
        first.rollout(task_id="t", foreign_ids=["a"])
        with rolltape.open(tmp_path) as second:
            second.rollout(task_id="t", foreign_ids=["other"], resume="force").finish()
            assert rolltape.read(tmp_path).rollout("a").head.foreign_ids == ("a",)
            with pytest.raises(NoSuchRollout):
                rolltape.read(tmp_path).rollout("other")


def test_each_try_has_its_own(tmp_path: Path) -> None:
    with rolltape.open(tmp_path, name="exp") as tape:
        for names in (["first", "both"], ["second", "both"], []):
            tape.rollout(task_id="t", foreign_ids=names, new_try=True).finish()
    run = rolltape.read(tmp_path)
    assert [run.rollout(name).head.try_index for name in ("first", "second", "both")] == [0, 1, 1]
    assert run.rollout("both", try_index=0).head.try_index == 0
    with pytest.raises(NoSuchRollout, match="rollout first has no try 1; it has 0"):
        run.rollout("first", try_index=1)


def test_own_ids_come_before_equal_foreign_ones_and_those_before_beginnings_of_own_ones(tmp_path: Path) -> None:
    (own,) = record(tmp_path, [])
    (other,) = record(tmp_path, [own, own[:4]], task_id="other")
    run = rolltape.read(tmp_path)
    assert [run.rollout(name).id for name in (own, own[:4], own[:5])] == [own, other, own]


def test_a_foreign_id_of_several_rollouts_is_refused_with_their_ids(tmp_path: Path) -> None:
    ids = sorted(record(tmp_path, ["same"], ["same"], ["else"]))
    run = rolltape.read(tmp_path)
    ids.remove(run.rollout("else").id)
    with pytest.raises(AmbiguousId) as refused:
        run.rollout("same")
    listed = ", ".join(ids)
    assert str(refused.value) == f"run exp: 'same' is a foreign id of 2 rollouts ({listed}); give one of these ids"


def test_a_foreign_id_counts_as_it_is_spelled(tmp_path: Path) -> None:
    record(tmp_path, ["Trace/1*"])
    run = rolltape.read(tmp_path)
    assert run.rollout("Trace/1*").head.attempt == 0
    for other in ("trace/1*", "Trace/1", "Trace/1*x"):
        with pytest.raises(NoSuchRollout):
            run.rollout(other)


def test_what_is_no_list_of_texts_is_refused(tmp_path: Path) -> None:
    with rolltape.open(tmp_path, name="exp") as tape:
        for wrong, why in (("a1", "give a list of texts"), ([7], "give a text"), ([""], "a foreign id is empty")):
            with pytest.raises(RecordError, match=why):
                tape.rollout(task_id="t", foreign_ids=wrong)  # type: ignore[arg-type]
        assert tape.run().index() == []


def test_a_rollout_without_them_is_stored_as_before(tmp_path: Path) -> None:
    (one,) = record_run(tmp_path, rollouts=1, turns=1)
    (row,) = rolltape.read(tmp_path).index()
    assert b"foreign" not in row.raw_head
    assert rolltape.read(tmp_path).rollout(one).head.foreign_ids == ()


def test_one_moment_of_the_index_stays_though_the_index_is_made_again(tmp_path: Path) -> None:
    ids = record(tmp_path, ["a"], ["b"])
    with rolltape.read(tmp_path).snapshot() as held:
        for path in (tmp_path / "cache").iterdir():
            path.unlink()
        assert [held.find(name).id for name in ("a", "b")] == ids
        record(tmp_path, ["zz"], task_id="later")
        rolltape.read(tmp_path).rollout("zz")
        with pytest.raises(NoSuchRollout):
            held.find("zz")


def test_rewards_tags_and_filters_are_given_by_a_foreign_id_or_the_beginning_of_an_id(tmp_path: Path) -> None:
    ids = record(tmp_path, ["a", "both"], ["c", "both"])
    with rolltape.open(tmp_path) as tape:
        tape.score("a", reward=7.0)
        tape.tag(ids[0][:12], "good")
        tape.filter("c", "too short", by="judge")
        with pytest.raises(AmbiguousId, match="'both' is a foreign id of"):
            tape.score("both", reward=1.0)
        with pytest.raises(NoSuchRollout, match="holds no rollout 'd'"):
            tape.tag("d", "good")
        with pytest.raises(NoSuchRollout, match=f"rollout {ids[0]} has no try 3; it has 0"):
            tape.score("a", reward=1.0, try_index=3)
    first, second = (rolltape.read(tmp_path).rollout(one) for one in ids)
    assert (first.reward, first.outcome.tags, first.outcome.filtered) == (7.0, ("good",), None)
    assert second.outcome.filtered is not None


def test_a_foreign_id_of_one_try_is_that_try_to_rewards_and_tags(tmp_path: Path) -> None:
    with rolltape.open(tmp_path, name="exp") as tape:
        for name in ("a", "b"):
            tape.rollout(task_id="t", foreign_ids=[name], new_try=True).finish(reward=0.0)
        tape.score("a", reward=7.0)
        tape.tag("b", "late")
    rows = rolltape.read(tmp_path).index()
    assert [(row.outcome.reward, row.outcome.tags) for row in rows] == [(7.0, ()), (0.0, ("late",))]
