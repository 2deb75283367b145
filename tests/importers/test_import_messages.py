"""Conversations of fine-tuning files become rollouts, message for message."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolltape
from importing import ANSWER, QUESTION, imported, write_lines
from rolltape.errors import ImportFileError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def conversations(run: Path) -> list[list[tuple[str, str]]]:
    return [
        [(message.role.value, message.text) for message in rollout.turns[-1].messages.to_list()]
        for rollout in rolltape.read(run).rollouts()
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [QUESTION, ANSWER]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": "2 + 2?", "completion": "4"},
    ],
)
def test_each_form_gives_the_same_conversation(tmp_path: Path, row: dict[str, Any]) -> None:
    imported("messages", write_lines(tmp_path / "rows.jsonl", [row]), tmp_path / "run")
    assert conversations(tmp_path / "run") == [[("user", "2 + 2?"), ("assistant", "4")]]


def test_a_pair_of_chosen_and_rejected_is_two_attempts_at_one_task(tmp_path: Path) -> None:
    row = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "5"}], "score_chosen": 1.0}
    imported("messages", write_lines(tmp_path / "rows.jsonl", [row]), tmp_path / "run")
    rows = rolltape.read(tmp_path / "run").index()
    assert [(one.attempt, one.head.tags) for one in rows] == [(0, ("chosen",)), (1, ("rejected",))]
    assert rows[0].head.extra["score_chosen"] == 1.0


def test_a_number_as_reward_is_the_reward_of_a_conversation_and_of_neither_of_a_pair(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [QUESTION, ANSWER], "reward": 0.25},
        {"messages": [QUESTION, ANSWER], "reward": "good"},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "5"}], "reward": 1},
    ]
    imported("messages", write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "run")
    assert [one.reward for one in rolltape.read(tmp_path / "run").index()] == [0.25, None, None, None]


def test_tools_calls_and_what_follows_the_last_reply_are_kept(tmp_path: Path) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    imported(
        "messages", write_lines(tmp_path / "rows.jsonl", [{"messages": messages, "tools": TOOLS}]), tmp_path / "run"
    )
    (rollout,) = rolltape.read(tmp_path / "run").rollouts()
    assert rollout.turns[0].root.tools == TOOLS
    assert rollout.turns[0].messages.to_list()[-1].to_dict()["tool_calls"] == [CALL]
    assert rollout.head.extra["messages_after_the_last_reply"] == [result]


def test_a_parquet_dataset_is_read_without_the_nulls_that_its_table_adds(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [QUESTION, ANSWER]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    imported("messages", tmp_path / "rows.parquet", tmp_path / "run")
    stored = [
        rollout.turns[0].messages.to_list()[-1].to_dict() for rollout in rolltape.read(tmp_path / "run").rollouts()
    ]
    assert stored == [{"role": "assistant", "content": None, "tool_calls": [CALL]}, ANSWER]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [QUESTION]}, "it has no message of the assistant"),
        ({"text": "hello"}, "it has text; a conversation is in messages"),
        ({"conversations": [{"from": "alien", "value": "?"}]}, "message 1 is from 'alien'"),
        ({"messages": ["hello"]}, "message 1 is not an object with a role"),
    ],
)
def test_rows_without_a_conversation_are_named(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ImportFileError, match=problem):
        imported("messages", write_lines(tmp_path / "rows.jsonl", [row]), tmp_path / "run")
