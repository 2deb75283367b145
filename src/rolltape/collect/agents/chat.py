"""The agent `chat`: it asks the model, calls the environment's tools, passes on answers, and stops at limits."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from rolltape.collect.agents.conversation import (
    ChatReply,
    GatewayConversation,
    GatewayFault,
    PromptRefused,
    TurnsUsedUp,
    frozen,
)
from rolltape.collect.agents.protocol import AgentOutcome, Assignment, StepRecord, preview_opening
from rolltape.collect.environments.protocol import Answer, Ended, Message, Opening, Tool, check_opening, drives
from rolltape.collect.functions import call_environment, call_function
from rolltape.errors import RecordError
from rolltape.records.jsonable import as_float, shown
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason

_DRIVE_GRACE_S = 600.0  # added to an attempt's time, for the setup and the scoring of an episode with its own loop


class ChatAgent:
    """Plays every seat of an episode in the order of the episode, each with its own conversation.

    The seat that ends the attempt gets the stop reason; the others have completed. Errors of the environment are
    passed on. An episode with its own agent loop runs itself.
    """

    name = "chat"

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None
        self._attempts = 0  # that use the connections now

    @asynccontextmanager
    async def _connections(self) -> AsyncIterator[aiohttp.ClientSession]:
        """One HTTP session for all attempts in flight: one for each would cost a tenth of a short attempt."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        http = self._http
        self._attempts += 1
        try:
            yield http
        finally:
            self._attempts -= 1
            if not self._attempts:
                self._http = None
                await http.close()

    def preview(self, assignment: Assignment) -> dict[str, Any]:
        """The opening of each seat."""
        episode = assignment.episode
        return {seat: preview_opening(episode.opening(seat)) for seat in episode.seats}

    async def run(self, assignment: Assignment) -> AgentOutcome:
        """Run until the episode is over, or a limit is reached."""
        if drives(assignment.episode):
            return await _drive(assignment)
        async with self._connections() as http:
            attempt = _EpisodeRun(assignment, http)
            try:
                async with asyncio.timeout(assignment.timeout_s) as limit:
                    await attempt.run()
            except GatewayFault as fault:
                return AgentOutcome(ended={}, broken=str(fault))
            except TimeoutError:
                if not limit.expired():
                    raise
                if attempt.environment_at_work:
                    why = f"the environment had not answered when {assignment.timeout_s:g} s were over"
                    return AgentOutcome(ended={}, timed_out=True, broken=why)
                attempt.time_out()
            return AgentOutcome(ended=attempt.ended(), timed_out=limit.expired())


async def _drive(assignment: Assignment) -> AgentOutcome:
    """Have an episode run itself, within the limits. If it exceeds them, it counts as broken."""
    episode, limit_s = assignment.episode, assignment.timeout_s + _DRIVE_GRACE_S
    assert drives(episode)
    try:
        async with asyncio.timeout(limit_s) as limit:
            ended = await call_environment(
                assignment.environment,
                episode.drive,
                assignment.connections,
                assignment.max_turns,
                assignment.timeout_s,
            )
    except TimeoutError:
        if not limit.expired():
            raise
        return AgentOutcome(ended={}, timed_out=True, broken=f"the environment had not ended after {limit_s:g} s")
    timed_out = any(one.stop_reason is StopReason.TIMEOUT for one in ended.values())
    return AgentOutcome(ended=ended, timed_out=timed_out)


class _Seat:
    def __init__(self, name: str, opening: Opening, assignment: Assignment, http: aiohttp.ClientSession) -> None:
        self.name = name
        self.tools = {tool.name: tool for tool in opening.tools}
        self.max_tool_calls = opening.max_tool_calls
        self.conversation = GatewayConversation(http, assignment.connections[name], opening)
        self.turns = 0
        self.tool_calls = 0
        self.text = ""  # of the last reply
        self.stop: StopReason | None = None


class _EpisodeRun:
    """One attempt."""

    def __init__(self, assignment: Assignment, http: aiohttp.ClientSession) -> None:
        self._assignment = assignment
        self._episode = assignment.episode
        self._http = http
        self._seats: dict[str, _Seat] = {}
        self._next: _Seat | None = None
        self._to_next: list[msgspec.Raw] = []
        self._reply: ChatReply | None = None  # the reply whose step is not reported yet
        self._results: list[Message] = []
        self.environment_at_work = False

    async def run(self) -> None:
        for name in self._episode.seats:
            opening = check_opening(await self._call(self._episode.opening, name))
            self._seats[name] = _Seat(name, opening, self._assignment, self._http)
        await self._look_ahead(None, StopReason.COMPLETED)
        while self._next is not None:
            seat = self._next
            try:
                await self._turn(seat)
            except TurnsUsedUp:
                self._stop(seat, StopReason.MAX_TURNS)
            except PromptRefused:
                self._stop(seat, StopReason.CONTEXT_OVERFLOW)

    def time_out(self) -> None:
        """Stop the seat whose reply or tools took too long."""
        assert self._next is not None
        seat = self._next
        self._stop(seat, StopReason.TIMEOUT)
        if self._reply is not None:
            self._report(seat, self._reply, None)

    def ended(self) -> dict[str, Ended]:
        return {
            seat.name: Ended(
                stop_reason=seat.stop or StopReason.COMPLETED, messages=seat.conversation.messages, text=seat.text
            )
            for seat in self._seats.values()
        }

    async def _turn(self, seat: _Seat) -> None:
        """One reply and what follows from it."""
        seat.conversation.add(self._to_next)
        self._to_next = []
        reply = await seat.conversation.ask()
        self._reply, self._results = reply, []
        seat.turns += 1
        seat.text = content_text(reply.message.get("content"))
        answer = None
        if reply.cut is not None:
            self._stop(seat, reply.cut)
        elif reply.calls:
            await self._call_tools(seat, reply)
        else:
            answer = await self._ask_environment(seat, reply)
        self._report(seat, reply, answer)

    async def _call_tools(self, seat: _Seat, reply: ChatReply) -> None:
        for call in reply.calls:
            if seat.tool_calls == seat.max_tool_calls:
                self._stop(seat, StopReason.MAX_TOOL_CALLS)
                return
            seat.tool_calls += 1
            content = await call_tool(seat.tools, call["function"])
            result: Message = {"role": "tool", "tool_call_id": call["id"], "content": content}
            self._results.append(result)
            seat.conversation.add(frozen([result]))
        await self._look_ahead(seat, StopReason.TOOL_STOPPED)

    async def _ask_environment(self, seat: _Seat, reply: ChatReply) -> Answer:
        answer = _check_answer(await self._call(self._episode.answer, seat.name, reply.for_environment()))
        self._to_next = frozen(answer.messages)
        if answer.done:
            self._stop(seat, answer.stop_reason)
        else:
            await self._look_ahead(seat, StopReason.COMPLETED)
        return answer

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the episode. A time-out meanwhile is not the policy's fault."""
        self.environment_at_work = True
        given = await call_environment(self._assignment.environment, method, *args)
        self.environment_at_work = False
        return given

    async def _look_ahead(self, last: _Seat | None, reason: StopReason) -> None:
        """Find the next seat, and whether it has turns left. If the episode is over, `last` stops for `reason`."""
        name = await self._call(self._episode.next_seat)
        self._next = None if name is None else self._seats[name]
        if self._next is None and last is not None:
            self._stop(last, reason)
        elif self._next is not None and self._next.turns >= self._assignment.max_turns:
            self._stop(self._next, StopReason.MAX_TURNS)

    def _stop(self, seat: _Seat, reason: StopReason) -> None:
        seat.stop = reason
        self._next = None

    def _report(self, seat: _Seat, reply: ChatReply, answer: Answer | None) -> None:
        self._reply = None
        if self._assignment.on_step is None:
            return
        step = StepRecord(
            turn=reply.turn,
            reply=reply.message,
            tool_results=tuple(self._results),
            answer=answer,
            stop_reason=seat.stop,
        )
        self._assignment.on_step(seat.name, step)


async def call_tool(tools: Mapping[str, Tool], function: Mapping[str, Any]) -> str:
    """The result of a tool call as text. An error is a result too."""
    tool = tools.get(function["name"])
    if tool is None:
        return f"error: there is no tool {shown(function['name'])}; there are: {', '.join(tools) or 'none'}"
    arguments = _parse_arguments(function["arguments"])
    if arguments is None:
        return f"error: the arguments of {tool.name} are not a JSON object: {shown(function['arguments'])}"
    try:
        return str(await call_function(tool.function, **arguments))
    except Exception as error:  # noqa: BLE001 - a tool may raise anything, and the model is told
        return f"error: {type(error).__name__}: {error}"


def _parse_arguments(text: object) -> dict[str, Any] | None:
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _check_answer(answer: object) -> Answer:
    """Raise RecordError for an answer that is not an Answer, or whose reward is not a number."""
    if not isinstance(answer, Answer):
        raise RecordError(f"the environment answered with {shown(answer)}; return an Answer")
    if answer.reward is not None:
        as_float(answer.reward, "the reward of the environment's answer")
    return answer
