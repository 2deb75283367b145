"""What is exported reads back as it was, bit for bit."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from exported import FORMATS, ROLLOUT_WRITERS, SAMPLE_WRITERS, TURN_WRITERS, a_sample, comparable, turn_facts
from rolltape.errors import ExportError
from rolltape.export import (
    messages_table,
    read_rollouts,
    read_samples,
    read_turns,
    samples_table,
    samples_to_jsonl,
    samples_to_parquet,
    turns_to_jsonl,
)
from rolltape.records.rollout import Event, Rollout, RolloutHead, Session, SessionHead
from rolltape.tape.recording.intake import SessionIntake


def a_rollout() -> Rollout:
    intake = SessionIntake(
        SessionHead(id="r.0.0", ordinal=0, stop_ids=(99,), tokenizer="tok", unknown={"later": [1, math.inf]}),
        tools=[{"name": "run", "parameters": {"n": 5000.0}}],
    )
    user = {"role": "user", "content": "fix ünït\u2028", "note": {"$float": "a key of the user's own"}}
    first = intake.accept(
        intake.code(
            prompt_messages=[user],
            prompt_ids=[1, 2, 3],
            segments=[
                {"sampled_ids": [4], "logprobs": [-0.1], "weight_version": "7"},
                {"sampled_ids": [99], "weight_version": ("7", "8")},
            ],
            reply={"role": "assistant", "content": "ok"},
            finish="stop",
            sampling={"temperature": math.inf},
            side_arrays={"experts": np.ones((2, 3), np.uint8)},
            reward=math.nan,
            extra={"a": [None, math.nan]},
        )
    )
    second = intake.accept(
        intake.code(
            after=first,
            new_messages=[{"role": "tool", "content": "1 failed"}],
            new_prompt_ids=[10, 11],
            message_starts=[0],
            sampled_ids=[12, 99],
            logprobs=np.array([-1.0, -2.0], np.float32),
            reply={
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "name": "run", "arguments": "{}"}],
            },
            finish="stop",
            weight_version="8",
        )
    )
    intake.accept(
        intake.code(
            prompt_messages=[user, {"role": "user", "content": "again"}],
            prompt_ids=[1, 2, 3, 50],
            sampled_ids=[],
            finish="error",
            error="engine gone",
            tools=[],
        )
    )
    assert second.logprobs is not None
    head = RolloutHead(
        id="r", try_index=0, group="g", run="exp", step=3, attempt=1, task_id="t", task={"q": [1, math.nan]},
        tags=("a",), started_at_ns=1_700_000_000_000_000_001, unknown={"newer": {"x": 1}},
    )  # fmt: skip
    events = [
        Event("w", 1, 10, "finish", "r", 0, None, None, {"status": "finished", "stop_reason": "completed"}),
        Event("w", 2, 11, "score", "r", 0, None, "judge", {"reward": math.inf, "terms": {"a": math.nan}}),
        Event("w", 3, 12, "novel", "r", None, "r.0.0.1", None, {"x": 1}),
    ]
    empty = Session(SessionHead(id="r.0.1", ordinal=1), [])
    return Rollout(head, [Session(intake.head, intake.turns), empty], events, writer_alive=False)


@pytest.mark.parametrize("suffix", FORMATS)
def test_samples_read_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    wide = a_sample(
        id="wide", logprobs=np.array([np.nan, np.nan, -0.1, -1 / 3]), advantage=-0.25, reward=None, versions=(),
        version_index=np.full(4, -1, np.int32), side={}, turn_rewards={}, logprob_kind=None,
    )  # fmt: skip
    samples = [a_sample(), wide]
    path = tmp_path / f"samples.{suffix}"
    assert SAMPLE_WRITERS[suffix](iter(samples), path) == 2
    assert [comparable(sample) for sample in read_samples(path)] == [comparable(sample) for sample in samples]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("whole_prompts", [False, True])
def test_turns_and_rollouts_read_back_equal(tmp_path: Path, suffix: str, whole_prompts: bool) -> None:
    rollout = a_rollout()
    turns, rollouts = tmp_path / f"turns.{suffix}", tmp_path / f"rollouts.{suffix}"
    TURN_WRITERS[suffix]([rollout], turns, whole_prompts=whole_prompts)
    ROLLOUT_WRITERS[suffix]([rollout], rollouts)
    (back,) = read_rollouts(rollouts, turns)
    assert [turn_facts(turn) for turn in back.turns] == [turn_facts(turn) for turn in rollout.turns]
    assert repr(back.head) == repr(rollout.head)
    assert repr(back.events) == repr(rollout.events)
    assert repr(back.outcome) == repr(rollout.outcome)
    assert [repr(session.head) for session in back.sessions] == [repr(session.head) for session in rollout.sessions]


def test_a_turn_row_holds_only_what_is_new(tmp_path: Path) -> None:
    turns_to_jsonl([a_rollout()], tmp_path / "turns.jsonl")
    first, second, third = map(json.loads, (tmp_path / "turns.jsonl").read_bytes().splitlines())
    assert first["new_prompt_ids"] == [1, 2, 3]
    assert (second["tokens_from"], second["kept_tokens"], second["new_prompt_ids"]) == ("r.0.0.0", 5, [10, 11])
    assert (second["messages_from"], second["kept_messages"]) == ("r.0.0.0", 2)
    assert [message["role"] for message in second["new_messages"]] == ["tool"]
    assert second["root"] is None
    assert (third["kept_tokens"], third["new_prompt_ids"], third["root"]["tools"]) == (3, [50], [])


def test_json_lines_are_strict_and_name_their_schema(tmp_path: Path) -> None:
    samples_to_jsonl([a_sample()], tmp_path / "s.jsonl")

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    row = json.loads((tmp_path / "s.jsonl").read_text(), parse_constant=refuse)
    assert row["schema"] == "rolltape.sample/1"
    assert row["logprobs"] == [None, None, float(np.float32(-0.1)), {"$float": "-inf"}]
    assert row["reward"] == {"$float": "nan"}
    assert row["trained_mask"] == [0, 0, 1, 0]


def test_parquet_has_number_columns_and_names_its_schema(tmp_path: Path) -> None:
    samples_to_parquet([a_sample()], tmp_path / "s.parquet")
    file = pq.ParquetFile(tmp_path / "s.parquet")
    assert file.schema_arrow.metadata[b"rolltape.schema"] == b"rolltape.sample/1"
    assert [str(file.schema_arrow.field(name).type) for name in ("ids", "trained_mask", "logprobs")] == [
        "list<element: int32>",
        "list<element: bool>",
        "list<element: double>",
    ]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize("suffix", FORMATS)
def test_no_rows_make_a_valid_file(tmp_path: Path, suffix: str) -> None:
    SAMPLE_WRITERS[suffix]([], tmp_path / f"none.{suffix}")
    assert list(read_samples(tmp_path / f"none.{suffix}")) == []


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_export_that_fails_leaves_the_file_as_it_was(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    path.write_text("before")

    def breaking() -> Any:
        yield a_sample()
        raise RuntimeError("mid-way")

    with pytest.raises(RuntimeError, match="mid-way"):
        SAMPLE_WRITERS[suffix](breaking(), path)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_errors_name_the_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    samples_to_jsonl([a_sample()], path)
    good = path.read_text()
    path.write_text(good + good.replace("rolltape.sample/1", "rolltape.sample/2"))
    with pytest.raises(ExportError, match=r"s.jsonl, line 2: schema is 'rolltape.sample/2'"):
        list(read_samples(path))
    path.write_text(good + '{"schema": "rolltape.sample/1"}\n')
    with pytest.raises(ExportError, match=r"s.jsonl, row 2: not a rolltape.sample/1"):
        list(read_samples(path))
    with pytest.raises(ExportError, match=r"no-folder/x.jsonl cannot be written"):
        samples_to_jsonl([], tmp_path / "no-folder/x.jsonl")
    with pytest.raises(ExportError, match=r"none.jsonl cannot be read"):
        list(read_samples(tmp_path / "none.jsonl"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ExportError, match=r"torn.parquet cannot be read"):
        list(read_turns(tmp_path / "torn.parquet"))


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    samples_to_jsonl([a_sample()], "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_tables_hold_each_message_once() -> None:
    table = messages_table([a_rollout()])
    assert table.select(["turn", "index", "role", "sampled"]).to_pylist() == [
        {"turn": "r.0.0.0", "index": 0, "role": "user", "sampled": False},
        {"turn": "r.0.0.0", "index": 1, "role": "assistant", "sampled": True},
        {"turn": "r.0.0.1", "index": 2, "role": "tool", "sampled": False},
        {"turn": "r.0.0.1", "index": 3, "role": "assistant", "sampled": True},
        {"turn": "r.0.0.2", "index": 1, "role": "user", "sampled": False},
    ]
    assert samples_table([a_sample()]).num_rows == 1
