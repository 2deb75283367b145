"""Assignments for agents: an episode that a test scripts, and connections to a gateway's sessions or to nowhere."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolltape.collect.agents import Assignment, Connection
from rolltape.collect.environments.protocol import AGENT, Answer, Ended, Message, Opening, Score, Tool
from rolltape.gateway.gateway import Gateway, GatewaySession
from rolltape.gateway.wire import base_urls

ROLLOUT = f"rollout-of-{os.getpid()}"  # by its name its processes are found, and another test process has its own

NOWHERE = Connection(base_urls=base_urls("http://127.0.0.1:9", "key"), key="key", model="the-model")


class ScriptedEpisode:
    """Answers in the order given; seats take turns. Without answers left it is over."""

    def __init__(
        self,
        *answers: Answer,
        seats: tuple[str, ...] = (AGENT,),
        messages: Sequence[Message] = ({"role": "user", "content": "Go."},),
        tools: Sequence[Tool] = (),
        files: Mapping[str, str] | None = None,
        max_tool_calls: int | None = None,
        meddle: Callable[[Message], object] = lambda reply: None,
    ) -> None:
        self.seats = seats
        self.answers = list(answers)
        self.messages = [dict(message) for message in messages]
        self.over = False
        self.replies: list[tuple[str, Message]] = []
        self._tools = tools
        self._files = files or {}
        self._max_tool_calls = max_tool_calls
        self._meddle = meddle

    def opening(self, seat: str) -> Opening:
        return Opening(
            messages=self.messages, tools=self._tools, files=self._files, max_tool_calls=self._max_tool_calls
        )

    def next_seat(self) -> str | None:
        return None if self.over or not self.answers else self.seats[len(self.replies) % len(self.seats)]

    async def answer(self, seat: str, reply: Message) -> Answer:
        self.replies.append((seat, dict(reply)))
        self._meddle(reply)
        return self.answers.pop(0)

    async def score(self, seat: str, ended: Ended) -> Score:
        return Score(reward=None)


def assigned(episode: ScriptedEpisode, place: Path, **fields: Any) -> Assignment:
    """An assignment with generous limits, to nowhere unless told."""
    given: dict[str, Any] = {
        "rollout": ROLLOUT,
        "task": {"question": "Why?"},
        "episode": episode,
        "connections": dict.fromkeys(episode.seats, NOWHERE),
        "max_turns": 20,
        "timeout_s": 60.0,
        "allowed_tools": None,
        "denied_tools": (),
        "seed": 7,
        "logs": place / "logs",
        "scratch": place / "scratch",
    }
    return Assignment(**{**given, **fields})


def connected(session: GatewaySession, model: str = "the-model") -> Connection:
    return Connection(base_urls=session.base_urls, key=session.key, model=model)


async def sessions_of(gateway: Gateway, seats: Sequence[str], **spec: Any) -> dict[str, GatewaySession]:
    """One open session a seat, all of one rollout."""
    opened: dict[str, GatewaySession] = {}
    for seat in seats:
        of: dict[str, Any] = {"rollout": next(iter(opened.values())).rollout} if opened else {"task_id": "t"}
        opened[seat] = await gateway.open_session(**of, **spec)
    return opened
