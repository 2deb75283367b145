"""Conversations as messages, for supervised fine-tuning."""

import json
from pathlib import Path
from typing import Any

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
    plain = {"role": "assistant", "content": "one"}
    assert [row["messages"] for row in rows] == [
        [user, plain, more, {"role": "assistant", "content": "two"}],
        [user, plain, other, {"role": "assistant", "content": "three"}],
    ]
    assert [(row["schema"], row["task_id"], row["reward"], row["tools"]) for row in rows] == [
        ("rolltape.conversation/1", "t", 0.5, TOOLS)
    ] * 2


def test_parquet_is_refused(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        rollout.finish(reward=0.5)
    assert rolltape_command(["export", str(tmp_path / "run"), "--what", "conversations", "-o", "x.parquet"]) == 2
