"""An environment that goes on changing what it gave and got does not alter the record, however an attempt ends."""

from pathlib import Path
from typing import Any

import pytest

import rolltape
from collecting import collected, instant, rollouts, task_file
from rolltape.records.rollout import StopReason
from scripted_engine import Asked, Step

MEDDLER = """
from rolltape.collect.environments import AGENT, Answer, Opening, Score
from rolltape.records.rollout import StopReason


class Meddler:
    name = "meddler"
    seats = (AGENT,)

    def check(self, task):
        pass

    def begin(self, task, seed):
        one = Meddler()
        one.task, one.given, one.state, one.replies = task.data, [[], [], {}], {"seen": ["start"]}, 0
        return one

    def opening(self, seat):
        self.given[0] = [{"role": "user", "content": "Go."}]
        return Opening(messages=self.given[0])

    def next_seat(self):
        return AGENT

    async def answer(self, seat, reply):
        self.meddle()
        malformed = "malformed_call" in reply.get("flags", ())
        reply["content"] = "forged"
        self.replies += 1
        if self.replies == 2:
            reason = StopReason.PARSE_ERROR if malformed else StopReason.COMPLETED
            return Answer(done=True, stop_reason=reason)
        self.given[1] = [{"role": "user", "content": "Again." + self.task["more"]}]
        self.state["seen"] = ["one"]
        return Answer(messages=self.given[1], env_state=self.state)

    async def score(self, seat, ended):
        data = {"stop": [ended.stop_reason.value]}
        for message in ended.messages:
            message["content"] = "forged"
        self.meddle()
        return Score(reward=0.5, reward_data=data)

    def meddle(self):
        for message in [*self.given[0], *self.given[1]]:
            message["content"] = "forged"
        self.state["seen"] = ["forged"]
"""
CALL = '<tool_call>\n{"name": \n</tool_call>'
LONG = " word" * 300
PATHS: dict[str, tuple[Step, StopReason, dict[str, Any]]] = {
    "success": (Step("two"), StopReason.COMPLETED, {}),
    "parse error": (Step(CALL), StopReason.PARSE_ERROR, {}),
    "overflow": (Step("two"), StopReason.CONTEXT_OVERFLOW, {"context_budget": 200}),
    "truncation": (Step("two", finish="length"), StopReason.MAX_TOKENS, {}),
    "time-out": (Step("two two two two", token_delay_s=20.0), StopReason.TIMEOUT, {"timeout_s": 2.0}),
}


@pytest.mark.parametrize("path", PATHS)
async def test_what_was_said_is_recorded_as_it_was_said(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meddling.py").write_text(MEDDLER)
    monkeypatch.syspath_prepend(tmp_path)
    second, reason, settings = PATHS[path]
    more = LONG if path == "overflow" else ""
    task = {"id": "t", "more": more, "environment": "python:meddling:Meddler"}

    def says(asked: Asked) -> Step:
        return second if "Again." in asked.prompt else Step("one")

    async with instant(says) as engine:
        await collected(task_file(tmp_path, [task]), tmp_path / "run", engine, group_size=1, **settings)
    (held,) = rollouts(tmp_path / "run")
    assert held.outcome.stop_reason is reason
    prompts = [[message["content"] for message in turn.prompt_messages] for turn in held.turns]
    assert prompts == [["Go."], ["Go.", "one", f"Again.{more}"]]
    trace = rolltape.trace_of(held)
    whole = trace.whole_prompt(1)
    assert isinstance(whole, list)
    assert [message["content"] for message in whole] == prompts[1]
    assert trace.steps[0].env_state == {"seen": ["one"]}
    assert trace.reward_data == {"stop": [reason.value]}
    assert "forged" not in str([turn.reply for turn in held.turns])
