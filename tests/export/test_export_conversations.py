"""Conversations as messages, for supervised fine-tuning."""

import json
from pathlib import Path
from typing import Any

import pytest

import rolltape
from rolltape.cli import run as rolltape_command

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def say(session: Any, prompt: list[dict[str, Any]], text: str, **fields: Any) -> dict[str, Any]:
    reply = {"role": "assistant", "content": text, "id": "minted"}
    session.record_turn(prompt_messages=prompt, prompt_ids=[], sampled_ids=[], reply=reply, finish="stop", **fields)
    return reply


def test_each_branch_is_one_conversation_and_side_requests_are_none(tmp_path: Path) -> None:
    user, more, other = ({"role": "user", "content": text} for text in ("hello", "go on", "something else"))
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        first = say(session, [user], "one", tools=TOOLS, token_faithful=False)
        say(session, [user, first, more], "two", tools=TOOLS, token_faithful=False)
        say(session, [user, first, other], "three", tools=TOOLS, token_faithful=False)
        say(session, [user], "a title", token_faithful=False, auxiliary="session title")
        rollout.finish(reward=0.5)
    out = tmp_path / "sft.jsonl"
    assert rolltape_command(["export", str(tmp_path / "run"), "--what", "conversations", "-o", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [[(one["content"], one.get("weight")) for one in row["messages"]] for row in rows] == [
        [("hello", None), ("one", 1), ("go on", None), ("two", 1)],
        [("hello", None), ("one", 0), ("something else", None), ("three", 1)],
    ]
    assert rows[0]["messages"][1] == {"role": "assistant", "content": "one", "weight": 1}
    assert [(row["schema"], row["task_id"], row["reward"], row["tools"]) for row in rows] == [
        ("rolltape.conversation/1", "t", 0.5, TOOLS)
    ] * 2


def test_a_rollout_of_which_nothing_trains_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        say(rollout.session(), [{"role": "user", "content": "hello"}], "one", token_faithful=False)
        rollout.fail("the engine is gone")
    out = tmp_path / "sft.jsonl"
    assert rolltape_command(["export", str(tmp_path / "run"), "--format", "messages", "-o", str(out)]) == 0
    assert out.read_text() == ""
    assert f"1 rollout left out, none of their replies trains: {rollout.id[:8]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--format", "atif"], "--format atif writes a folder; name one"),
        (["--format", "datasets"], "--format datasets writes a folder; name one"),
        (["--format", "atif", "--what", "samples", "-o", "x"], "--format atif writes rollouts, not --what samples"),
        (["--format", "messages", "-o", "x.parquet"], "--format messages is written as .jsonl"),
        (["--what", "records", "-o", "x.parquet"], "--what records: records have no Parquet form; use --format jsonl"),
        (
            ["-o", "hf://x"],
            "hf://x: a URL, and exports are written to this machine; name a file or folder and copy it, or",
        ),
        (["--format", "slime", "-o", "s3://b/x.pt"], "s3://b/x.pt: a URL, and exports are written to this machine"),
        (["--format", "atif", "-o", "hf://x"], "hf://x: a URL, and exports are written to this machine"),
        (["--format", "datasets", "-o", "s3://b/x"], "s3://b/x: a URL, and exports are written to this machine"),
        (["--format", "datasets", "-o", "hf://datasets/alone"], "names no repository; write hf://datasets/OWNER/NAME"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        rollout.finish(reward=0.5)
    assert rolltape_command(["export", str(tmp_path / "run"), *options]) != 0
    assert problem in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
