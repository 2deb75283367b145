"""A source's split: given by name, recorded and hashed as `source#split`, and decided in one place."""

from pathlib import Path

import pytest

import rolltape
from rolltape.collect import open_source
from rolltape.errors import RecordError
from rolltape.records.ids import join_source, split_in
from rolltape.tracking.push import StepKey, by_step


def test_a_split_given_by_name_is_the_rollout_that_the_joined_text_names(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "a", name="run") as one, rolltape.open(tmp_path / "b", name="run") as other:
        joined = one.rollout(task_id="t", source="gsm8k#test")
        named = other.rollout(task_id="t", source="gsm8k", split="test")
        assert (named.id, named.group) == (joined.id, joined.group)
        assert (named.head.source, named.head.split) == ("gsm8k#test", "test")


def test_an_evaluation_with_a_split_is_not_counted_as_training(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for split in ("train", "test", None):
            tape.rollout(task_id="t", source="gsm8k:main", split=split).finish()
        steps = by_step(tape.run().index())
    assert {key: len(rows) for key, rows in steps.items()} == {StepKey(0, "train"): 2, StepKey(0, "test"): 1}


@pytest.mark.parametrize(
    ("source", "split"),
    [
        ("gsm8k", None),
        ("gsm8k:test", None),
        ("gsm8k#test", "test"),
        ("a#b#test", "test"),
        ("gsm8k#", None),
        (None, None),
    ],
)
def test_the_split_of_a_source_stands_after_its_last_mark(source: str | None, split: str | None) -> None:
    assert split_in(source) == split


def test_a_source_that_names_the_same_split_already_stays_as_it_is() -> None:
    assert join_source("gsm8k#test", "test") == "gsm8k#test"
    assert join_source(None, "test") == "#test"
    assert join_source("gsm8k", None) == "gsm8k"


@pytest.mark.parametrize(("source", "split"), [("gsm8k#train", "test"), ("gsm8k", ""), ("gsm8k", "a#b")])
def test_a_split_that_contradicts_its_source_or_is_no_name_is_refused(source: str, split: str, tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, pytest.raises(RecordError, match="split"):
        tape.rollout(task_id="t", source=source, split=split)


def test_a_name_with_the_mark_in_it_names_no_split(tmp_path: Path) -> None:
    path = tmp_path / "a#b.jsonl"
    path.write_text('{"id": "one", "prompt": "?"}\n')
    assert split_in(open_source(path).name) is None
    assert split_in(open_source(path, split="test").name) == "test"
