"""Tags and notes on the tape: of rollouts, turns and tokens, by several writers, kept by seal, publish and prune."""

import itertools
from pathlib import Path

import pytest

import rolltape
from rolltape.errors import NoSuchRollout, RecordError
from rolltape.records.rollout import Annotations, Event, EventKind, annotations_of
from rolltape.tape.recording.tape import Tape
from taped import first_turn


def record(tape: Tape, task: str = "t", tags: tuple[str, ...] = ()) -> tuple[str, str]:
    """A finished rollout, and its turn."""
    with tape.rollout(task_id=task, tags=tags) as rollout:
        turn = first_turn(rollout.session())
        rollout.finish(reward=1.0)
    return rollout.id, turn.id


def told(annotations: Annotations) -> list[tuple[object, ...]]:
    tags = [(one.name, one.turn, one.tokens, one.by) for one in annotations.tags]
    return [*tags, *((one.text, one.turn, one.tokens, one.by) for one in annotations.notes)]


def test_tags_and_notes_of_rollout_turn_and_token_are_read_back_with_their_authors(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout, turn = record(tape, tags=("launched",))
        record(tape, "other")
        tape.add_tags(rollout[:8], "hack", "bookmark", by="ada")
        tape.add_tags(rollout, "odd", turn=turn, by="bob")
        tape.add_tags(rollout, "bookmark", turn=turn, tokens=(2, 3), by="bob")
        tape.remove_tags(rollout, "hack", by="bob")
        first = tape.add_note(rollout, "deletes\nthe test \U0001fae0", by="ada")
        second = tape.add_note(rollout, "here", turn=turn, tokens=(1, 4), by="bob")
        tape.edit_note(rollout, first, "deletes two tests", by="bob")
    run = rolltape.read(tmp_path / "run")
    expected = [
        ("launched", None, None, None),
        ("bookmark", None, None, "ada"),
        ("odd", turn, None, "bob"),
        ("bookmark", turn, (2, 3), "bob"),
        ("deletes two tests", None, None, "ada"),
        ("here", turn, (1, 4), "bob"),
    ]
    assert told(run.rollout(rollout).annotations) == expected
    assert told(run.annotations(rollout, 0)) == expected
    assert run.rollout(rollout).annotations.notes[0].edited_by == "bob"
    row, other = run.index()
    assert (row.outcome.tags, row.inner_tags, row.notes) == (("launched", "bookmark"), ("odd", "bookmark"), 2)
    assert (other.outcome.tags, other.inner_tags, other.notes) == ((), (), 0)
    assert run.rollout(rollout).outcome.tags == row.outcome.tags
    assert list(run.annotations_by_hand()) == [(rollout, 0)]
    with rolltape.open(tmp_path / "run") as tape:
        tape.remove_note(rollout, second, by="ada")
        tape.tag(rollout, "hack", "launched")
        with pytest.raises(NoSuchRollout, match=f"has no note '{second}'"):
            tape.edit_note(rollout, second, "again")
    assert run.index()[0].outcome.tags == ("hack", "launched")
    assert run.index()[0].notes == 1
    history = [event.data.get("text") for event in run.rollout(rollout).events if event.kind == EventKind.NOTE]
    assert history == ["deletes\nthe test \U0001fae0", "here", "deletes two tests", None]


def test_tags_and_notes_of_a_rollout_that_runs_are_indexed_at_once(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, rolltape.open(tmp_path / "run") as viewer:
        rollout = tape.rollout(task_id="t")
        turn = first_turn(rollout.session())
        tape.add_note(rollout.id, "mine", turn=turn.id, by="writer")
        viewer.add_note(rollout.id, "yours", turn=turn.id, by="viewer")
        viewer.add_tags(rollout.id, "live", turn=turn.id)
        (row,) = tape.run().index()
        assert (row.status, row.notes, row.inner_tags) == ("running", 2, ("live",))
        rollout.finish(reward=0.5)
        (row,) = tape.run().index()
        assert (row.status, row.notes, row.inner_tags) == ("finished", 2, ("live",))


@pytest.mark.parametrize("to", [None, "elsewhere"])
def test_sealing_publishing_and_pruning_keep_tags_and_notes(tmp_path: Path, to: str | None) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout, turn = record(tape)
        tape.add_tags(rollout, "before", turn=turn)
        with rolltape.open(tmp_path / "run") as viewer:  # a process of its own in all that matters here
            viewer.add_note(rollout, "by another", turn=turn, tokens=(0, 1), by="ada")
    target = None if to is None else tmp_path / to
    rolltape.seal(tmp_path / "run", to=target)
    expected = [("before", turn, None, None), ("by another", turn, (0, 1), "ada")]
    place = target or tmp_path / "run"
    assert told(rolltape.read(place).rollout(rollout).annotations) == expected
    assert [(row.inner_tags, row.notes) for row in rolltape.read(place).index()] == [(("before",), 1)]
    with rolltape.open(tmp_path / "run") as tape:
        tape.add_note(rollout, "after", by="bob")
    rolltape.seal(tmp_path / "run", to=target)
    assert [row.notes for row in rolltape.read(place).index()] == [2]
    if to is None:
        rolltape.prune(tmp_path / "run", before_step=1)
        assert [row.notes for row in rolltape.read(place).index()] == [2]
        assert told(rolltape.read(place).rollout(rollout).annotations)[:2] == expected


def test_what_holds_does_not_depend_on_the_order_in_which_the_index_meets_the_events(tmp_path: Path) -> None:
    """Events of four writers, indexed one writer at a time in every order."""
    with rolltape.open(tmp_path / "run") as tape:
        rollout, _ = record(tape, tags=("a",))
    for number, change in enumerate(("tag", "add", "remove", "note")):
        with rolltape.open(tmp_path / "run") as tape:
            if change == "tag":
                tape.tag(rollout, "b", "c", by=str(number))
            elif change == "add":
                tape.add_tags(rollout, "d", "e", by=str(number))
            elif change == "remove":
                tape.remove_tags(rollout, "c", "d", by=str(number))
            else:
                tape.add_note(rollout, "n", by=str(number))
    journals = tmp_path / "run" / "journals"
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    names = sorted(one.stem for one in journals.glob("*.sqlite"))
    for order in itertools.islice(itertools.permutations(names), 0, 120, 7):
        for path in journals.iterdir():
            path.rename(hidden / path.name)
        index = rolltape.read(tmp_path / "run").tape_index
        index.file.replace(keep=False)
        for name in order:
            for path in hidden.glob(f"{name}.*"):
                path.rename(journals / path.name)
            index.advance()
        (row,) = index.rows()
        assert (row.outcome.tags, row.notes) == (("b", "e"), 1)
        index.close()


def test_places_and_texts_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout, turn = record(tape)
        with pytest.raises(RecordError, match="no tag; give at least one"):
            tape.add_tags(rollout)
        with pytest.raises(RecordError, match=r"give 1 to 100 on one line"):
            tape.add_tags(rollout, "two\nlines")
        with pytest.raises(RecordError, match=r"a note of 20,001 characters; give 1 to 20,000"):
            tape.add_note(rollout, "x" * 20_001)
        with pytest.raises(RecordError, match="without a turn; give the turn"):
            tape.add_note(rollout, "x", tokens=(1, 2))
        with pytest.raises(RecordError, match="start at 3 and stop at 3"):
            tape.add_note(rollout, "x", turn=turn, tokens=(3, 3))
        with pytest.raises(RecordError, match="tokens are 3, a int; give a list of two numbers"):
            tape.add_tags(rollout, "x", turn=turn, tokens=3)  # type: ignore[arg-type]
        with pytest.raises(NoSuchRollout, match="its session has 1 turns"):
            tape.add_note(rollout, "x", turn=f"{rollout}.0.0.7")
    assert rolltape.read(tmp_path / "run").index()[0].notes == 0


def test_an_event_that_says_something_else_is_a_problem_and_hides_no_other_note(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        rollout, _ = record(tape)
        tape.append_event(EventKind.NOTE, rollout, {"note": 7})
        tape.add_note(rollout, "whole", by="ada")
    run = rolltape.read(tmp_path / "run")
    assert run.index()[0].notes == 1
    assert told(run.rollout(rollout).annotations) == [("whole", None, None, "ada")]
    assert "the note of rollout" in "".join(map(str, run.noticed()))


def test_a_tag_given_twice_keeps_its_first_author_and_one_taken_away_twice_is_gone() -> None:
    def event(sequence: int, by: str, **data: list[str]) -> Event:
        return Event("w", sequence, sequence, EventKind.RETAG, "r", 0, None, by, dict(data))

    events = [event(1, "ada", added=["x"]), event(2, "bob", added=["x", "y"]), event(3, "bob", removed=["y"])]
    assert told(annotations_of([*events, event(4, "ada", removed=["y"])])) == [("x", None, None, "ada")]
