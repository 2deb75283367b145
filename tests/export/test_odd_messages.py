"""A message may have anything in its fields: each format writes it, with text where the format needs text."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rolltape
from rolltape.export import conversations_to_parquet
from rolltape.export.formats import trajectory, write_inspect_log
from rolltape.records.rollout import Rollout

CALL = {"id": 3, "type": ["function"], "function": {"name": 5, "arguments": {"a": 1}}}
ODD: dict[str, dict[str, Any]] = {
    "a call": {"role": "assistant", "content": "so", "tool_calls": [CALL, None, "x"]},
    "calls that are no list": {"role": "assistant", "content": "so", "tool_calls": 5},
    "parts": {"role": "assistant", "content": [{"type": "text", "text": 5}, None, {"type": "image"}]},
    "a name": {"role": "assistant", "content": "so", "name": {"first": "a"}},
}


def a_rollout(folder: Path, reply: dict[str, Any]) -> Rollout:
    with rolltape.open(folder) as tape, tape.rollout(task_id="t") as rollout:
        result = {"role": "tool", "content": "ok", "tool_call_id": 3}
        rollout.session().record_turn(
            prompt_messages=[{"role": "user", "content": "go"}, result],
            prompt_ids=[1, 2],
            sampled_ids=[3],
            logprobs=[-0.5],
            reply=reply,
            finish="stop",
        )
        rollout.finish(reward=1.0)
    return rolltape.read(folder).rollout(rollout.id)


@pytest.mark.parametrize("reply", ODD.values(), ids=ODD)
def test_odd_messages_are_written_in_each_format(tmp_path: Path, reply: dict[str, Any]) -> None:
    rollout = a_rollout(tmp_path / "run", reply)
    assert conversations_to_parquet([rollout], tmp_path / "rows.parquet") == 1
    document = trajectory(rollout)
    assert document is not None
    assert document["steps"][-1]["extra"]["rolltape"]["message"] == reply


@pytest.mark.parametrize("reply", ODD.values(), ids=ODD)
def test_odd_messages_are_written_for_inspect(tmp_path: Path, reply: dict[str, Any]) -> None:
    pytest.importorskip("inspect_ai")
    assert write_inspect_log([a_rollout(tmp_path / "run", reply)], tmp_path / "log.json") == 1


def test_fields_that_are_no_text_are_json_in_a_table(tmp_path: Path) -> None:
    rollout = a_rollout(tmp_path / "run", ODD["a call"])
    conversations_to_parquet([rollout], tmp_path / "rows.parquet")
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    *_, result, reply = rows[0]["messages"]
    assert result["tool_call_id"] == "3"
    assert reply["tool_calls"] == [
        {"id": "3", "type": '["function"]', "function": {"name": "5", "arguments": '{"a":1}'}}
    ]
