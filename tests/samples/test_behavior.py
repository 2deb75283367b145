"""What a rollout's replies and tools did is counted from its messages."""

import json
from typing import Any

import pytest

from rolltape.records.rollout import EventKind
from rolltape.records.sample import BehaviorCounts
from rolltape.samples.behavior import count_behavior
from rolltape.samples.summary import summarize
from sessions import Recording, event, rollout_of, user


def _call(name: str, arguments: object) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    called = {"id": "c", "type": "function", "function": {"name": name, "arguments": text}}
    return {"role": "assistant", "content": None, "tool_calls": [called]}


def _edits(reply: dict[str, Any]) -> int:
    recording = Recording()
    recording.ask([user("u")], "a", reply=reply)
    return count_behavior(rollout_of(recording.session())).test_edits


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("write_file", {"path": "/work/tests/test_dates.py", "content": "pass"}),
        ("Edit", {"file_path": "src/dates_test.go", "old_string": "a", "new_string": "b"}),
        ("str_replace_based_edit_tool", {"command": "str_replace", "path": "web/src/App.test.tsx"}),
        ("apply_patch", {"input": "*** Begin Patch\n*** Update File: tests/helpers.py\n@@\n-a\n+b\n"}),
        ("apply_patch", "*** Begin Patch\n*** Delete File: conftest.py\n"),
        ("bash", {"command": "sed -i 's/assert/#/' /testbed/tests/test_a.py && pytest"}),
        ("bash", {"command": "cat > tests/test_a.py <<'EOF'\npass\nEOF"}),
        ("shell", {"command": ["bash", "-lc", "rm -rf src/test/java/DatesTest.java"]}),
        ("bash", {"command": "cp /tmp/easy.py tests/test_a.py"}),
        ("bash", {"cmd": "git checkout HEAD~1 -- spec/models/user_spec.rb"}),
        ("python", {"code": "open('tests/test_a.py', 'w').write('')"}),
    ],
)
def test_a_call_that_changes_a_file_of_tests_is_counted(name: str, arguments: object) -> None:
    assert _edits(_call(name, arguments)) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bash", {"command": "pytest tests/test_dates.py > /tmp/out.txt 2>&1"}),
        ("bash", {"command": "cat tests/test_dates.py; sed -n 1,20p tests/test_dates.py"}),
        ("bash", {"command": "cp tests/test_a.py /tmp/kept.py"}),
        ("read_file", {"path": "tests/test_dates.py"}),
        ("str_replace_based_edit_tool", {"command": "view", "path": "tests/test_dates.py"}),
        ("write_file", {"path": "src/latest.py", "content": "see tests/test_dates.py"}),
        ("write_file", {"path": "src/contest/attest.py", "content": "x"}),
        ("python", {"code": "open('tests/test_a.py').read()"}),
        ("bash", "not JSON: test"),
    ],
)
def test_reading_or_running_a_test_is_no_edit(name: str, arguments: object) -> None:
    assert _edits(_call(name, arguments)) == 0


def test_tool_errors_are_marked_or_begin_with_the_word_and_each_result_counts_once() -> None:
    recording = Recording()
    results = [
        {"role": "tool", "tool_call_id": "1", "content": "error: no such file"},
        {"role": "tool", "tool_call_id": "2", "content": "error: no such file"},
        {"role": "tool", "tool_call_id": "3", "content": [{"type": "text", "text": "denied"}], "is_error": True},
        {"role": "tool", "tool_call_id": "4", "content": "1 error: in the middle"},
        {"role": "tool", "tool_call_id": "5", "content": "Errors: none"},
        {"role": "tool", "tool_call_id": "6", "content": "fine", "is_error": False},
        {"role": "tool", "content": "ERROR : shouted"},
        {"role": "tool", "content": "ERROR : shouted"},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "7", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "8", "content": "yes"},
            ],
        },
    ]
    first = recording.ask([user("u")], "a")
    recording.record(after=first, new_messages=results, new_prompt_ids=[9], **recording.answered("b"))
    said = {"role": "assistant", "content": "a"}
    again = [user("other"), said, *results, user("again")]  # a fork repeats them all
    recording.record(prompt_messages=again, prompt_ids=[7, 8], **recording.answered("c"))
    found = count_behavior(rollout_of(recording.session()))
    assert (found.tool_results, found.tool_errors) == (10, 6)


def test_replies_that_a_limit_cut_are_counted_and_auxiliary_calls_are_not() -> None:
    recording = Recording()
    recording.ask([user("u")], "a", finish="length")
    recording.ask([user("u")], "A title", auxiliary="title", finish="length")
    assert count_behavior(rollout_of(recording.session())).cut_replies == 1


def test_a_rollout_whose_turns_were_pruned_has_no_known_behavior() -> None:
    pruned = event(5, EventKind.PRUNE, {"pruned": "turns", "turns": 3, "sampled_tokens": 9})
    assert summarize(rollout_of(events=[pruned])).behavior is None
    assert summarize(rollout_of()).behavior == BehaviorCounts(0, 0, 0, 0)


@pytest.mark.parametrize("part", ["rm ", "rm a/", "sed -i ", "> /", "cp tests ", "test_/", "open('tests/"])
def test_what_a_policy_writes_cannot_make_the_count_slow(part: str) -> None:
    # It would take hours if it grew with the square of the length.
    assert _edits(_call("bash", {"command": part * 200_000 + "?", "path": part * 200_000 + "?"})) == 0
