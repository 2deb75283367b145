"""The environment `message`: several turns, with Python functions as tools, or a function for the other side."""

import asyncio
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rolltape.collect.environments.mcp import McpServer, McpServerSpec, McpTool, check_server
from rolltape.collect.environments.protocol import AGENT, Answer, Ended, Episode, Message, Opening, Score, Tool
from rolltape.collect.environments.scoring import CheckFields, parse_checks, parse_score, run_checks, score_unfinished
from rolltape.collect.environments.task_fields import (
    build_opening,
    check_prompt,
    copy_entry,
    parse_fields,
    user_message,
)
from rolltape.collect.environments.tools import FunctionTool, ToolAnswer, ToolSpec, describe_tool
from rolltape.collect.functions import call_function, function_named
from rolltape.collect.tasks import Task
from rolltape.errors import RecordError, TaskError, ToolServerError
from rolltape.records.jsonable import as_float
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason
from rolltape.records.turn import TurnFlag

# The correction that the model gets, by the flag of a reply whose call was delivered as text.
_CORRECTIONS = {
    TurnFlag.MALFORMED_CALL: "Your tool call could not be read. Write one complete call with its arguments as JSON.",
    TurnFlag.DENIED_TOOL: "That tool may not be called.",
}

Then = Literal["tell", "end"]


class ErrorHandling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tell` the model what was wrong and continue, or `end` the attempt."""

    then: Then = "tell"
    reward: float = 0.0  # each time
    at_most: Annotated[int, msgspec.Meta(ge=0)] | None = None  # one more ends the attempt; None for no limit


class MessageFields(CheckFields, frozen=True, kw_only=True):
    """Fields of a task of this kind."""

    tools: list[str | ToolSpec] = []
    mcp: list[McpServerSpec] = []  # servers whose tools are offered too
    episode: str | None = None  # "python:module:function"
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None
    malformed: Then | ErrorHandling = "tell"  # calls that cannot be read, or do not fit their tool
    tool_error: Then | ErrorHandling = "tell"  # errors that a tool's function raises


class MessageEnvironment:
    """Runs until the model answers without a call, or the episode function returns."""

    name = "message"
    calls_user_code = True  # a task may name functions that `begin` calls

    def check(self, task: Task) -> None:
        fields = parse_fields(task, MessageFields)
        check_prompt(fields, needed=fields.episode is None)
        names = [describe_tool(tool).name for tool in fields.tools]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise TaskError(f"its tools {', '.join(sorted(repeated))} appear twice; give each its own name")
        for server in fields.mcp:
            check_server(server)
        if fields.episode is not None:
            function_named(fields.episode)
            if fields.answer is not None or fields.check is not None:
                raise TaskError("it has an episode function, which rewards, and an answer or check; keep one of them")
        elif fields.answer is not None or fields.check is not None:
            parse_checks(fields)
        elif not fields.tools and not fields.mcp:
            raise TaskError('it has neither tools nor an answer to check nor an episode; add "tools" or "episode"')

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_fields(task, MessageFields)
        if fields.episode is None:
            return MessageEpisode(task, fields, None)
        made: Any = function_named(fields.episode)(copy_entry(task), seed)
        if isinstance(made, Generator):
            return MessageEpisode(task, fields, EpisodeScript(made, fields.episode))
        if not hasattr(made, "next_seat"):
            kind = type(made).__name__
            raise TaskError(f"{fields.episode} returned something of type {kind}; let it yield, or return an Episode")
        episode: Episode = made
        return episode


class EpisodeScript:
    """The other side of a conversation as a generator: it yields messages, gets replies, and returns the reward.

    It may yield text, messages, an Answer, or None.
    """

    def __init__(self, generator: Generator[Any, str, Any], name: str) -> None:
        self._generator = generator
        self._name = name
        self.score = Score(reward=None)
        try:
            self.first = list(_parse_answer(next(generator)).messages)
        except StopIteration:
            raise TaskError(f"{name} ended before the first reply; let it yield before it returns") from None

    async def answer(self, text: str) -> Answer:
        """The generator's answer to a reply; done if it has returned."""
        goes_on, given = await call_function(self._send, text)
        if goes_on:
            answer = _parse_answer(given)
            if answer.done:
                self.score = Score(reward=0.0)  # its steps were rewarded
                self.close()
            return answer
        self.score = Score(reward=None) if given is None else parse_score(given, self._name)
        return Answer(done=True)

    def close(self) -> None:
        """End the generator, since the attempt has ended."""
        self._generator.close()

    def _send(self, text: str) -> tuple[bool, Any]:
        # A future cannot hold StopIteration.
        try:
            return True, self._generator.send(text)
        except StopIteration as end:
            return False, end.value


class ErrorCounts:
    """Counts an attempt's errors by kind, and finds the one that ends it."""

    def __init__(self, **handling: Then | ErrorHandling) -> None:
        """`handling` has the action for each kind of error."""
        self._handling = {
            kind: one if isinstance(one, ErrorHandling) else ErrorHandling(then=one) for kind, one in handling.items()
        }
        self.counts: Counter[str] = Counter()
        self.ended_by: str | None = None  # the kind that ended the attempt

    def add(self, kind: str) -> ErrorHandling:
        """Count an error. If it ends the attempt, `ended_by` is set."""
        handling = self._handling[kind]
        self.counts[kind] += 1
        is_over_limit = handling.at_most is not None and self.counts[kind] > handling.at_most
        if handling.then == "end" or is_over_limit:
            self.ended_by = kind
        return handling

    def correct(self, correction: str, text: str) -> Answer:
        """Count a malformed reply with this text, and answer it: with the correction, unless it ends the attempt."""
        handling = self.add("malformed")
        is_over = self.ended_by is not None
        return Answer(
            messages=() if is_over else [user_message(correction)],
            done=is_over,
            reward=handling.reward,
            stop_reason=StopReason.PARSE_ERROR,
            reward_data={"malformed": text},
        )


class MessageEpisode:
    """One attempt: the model, its tools, and perhaps a script for the other side."""

    seats = (AGENT,)

    def __init__(self, task: Task, fields: MessageFields, script: EpisodeScript | None) -> None:
        self._task = task
        self._fields = fields
        self._script = script
        self._tools = [describe_tool(tool) for tool in fields.tools]
        self._errors = ErrorCounts(malformed=fields.malformed, tool_error=fields.tool_error)
        self._tool_reward = 0.0
        self._fault: RecordError | None = None  # an error of a tool itself, independent of its arguments
        self._over = False
        self._servers = [McpServer(one) for one in fields.mcp]
        self._served: list[McpTool] = []  # tools of those servers, once they are open
        self._broken: ToolServerError | None = None

    async def open(self) -> None:
        """Start the servers of tools."""
        for server in self._servers:
            self._served += await server.open()
        names = self._tool_names()
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ToolServerError(f'there are several tools named {", ".join(repeated)}; give a server a "prefix"')

    async def close(self) -> None:
        """End the servers of tools."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def opening(self, seat: str) -> Opening:
        tools = [*map(self._tool, self._tools), *map(self._served_tool, self._served)]
        opening = build_opening(self._fields, tools, self._fields.max_tool_calls)
        if self._script is not None:
            opening.messages.extend(self._script.first)
        return opening

    def next_seat(self) -> str | None:
        if self._broken is not None:
            raise self._broken
        return None if self._over else AGENT

    async def answer(self, seat: str, reply: Message) -> Answer:
        text = content_text(reply.get("content"))
        unreadable = [flag for flag in reply.get("flags", ()) if flag in _CORRECTIONS]
        if unreadable:
            answer = self._errors.correct(_CORRECTIONS[unreadable[0]], text)
        else:
            answer = Answer(done=True) if self._script is None else await self._script.answer(text)
        self._over = answer.done
        return answer

    async def score(self, seat: str, ended: Ended) -> Score:
        if self._fault is not None:
            raise self._fault
        for name in _called_tools(ended.messages[len(self.opening(seat).messages) :]):
            if name not in self._tool_names():
                self._add_error("malformed", name)  # the agent has told the model that there is no such tool
        score = await self._score(ended)
        data = dict(score.reward_data or {})
        if self._errors.counts:
            data["mishaps"] = dict(self._errors.counts)
        if not self._tool_reward:
            return msgspec.structs.replace(score, reward_data=data or None)
        terms = {**score.terms, "tools": self._tool_reward}
        reward = None if score.reward is None else score.reward + self._tool_reward
        return msgspec.structs.replace(score, reward=reward, terms=terms, reward_data=data or None)

    async def _score(self, ended: Ended) -> Score:
        ended_by_error = self._errors.ended_by is not None
        unfinished = score_unfinished(self._fields, StopReason.PARSE_ERROR if ended_by_error else ended.stop_reason)
        if unfinished is not None:
            if self._script is not None:
                self._script.close()
            return unfinished
        if self._script is not None:
            return self._script.score
        if self._fields.answer is None and self._fields.check is None:
            return Score(reward=0.0)  # the tools reward
        return await run_checks(parse_checks(self._fields), copy_entry(self._task), ended)

    def _tool(self, tool: FunctionTool) -> Tool:
        async def function(**arguments: Any) -> str:
            try:
                converted = tool.convert_arguments(arguments)
            except msgspec.ValidationError as error:
                return self._add_error("malformed", f"{tool.name}: {error}")
            try:
                result = await call_function(tool.function, **converted)
            except Exception as error:  # noqa: BLE001 - its arguments are the model's: whatever it raises is an outcome
                return self._add_error("tool_error", str(error) or type(error).__name__)
            try:
                return self._take_result(tool.name, result)
            except RecordError as error:
                # The model did not cause it: the attempt is broken, and ends here.
                self._fault, self._over = error, True
                return f"error: {error}"

        return Tool(tool.name, tool.description, tool.parameters, function)

    def _tool_names(self) -> list[str]:
        return [*(tool.name for tool in self._tools), *(tool.name for tool in self._served)]

    def _served_tool(self, tool: McpTool) -> Tool:
        async def function(**arguments: Any) -> str:
            try:
                return await tool.server.call(tool.own_name, arguments)
            except ValueError as error:
                return self._add_error("malformed", f"{tool.name}: {error}")
            except RuntimeError as error:
                return self._add_error("tool_error", str(error))
            except ToolServerError as error:
                self._broken = error
                return f"error: {error}"

        return Tool(tool.name, tool.description, tool.parameters, function)

    def _add_error(self, kind: str, message: str) -> str:
        self._tool_reward += self._errors.add(kind).reward
        self._over = self._over or self._errors.ended_by is not None
        return f"error: {message}"

    def _take_result(self, name: str, result: Any) -> str:
        if isinstance(result, ToolAnswer):
            self._tool_reward += as_float(result.reward, f"the tool {name}: the reward")
            self._over = self._over or result.done
            return result.text
        try:
            return result if isinstance(result, str) else msgspec.json.encode(result).decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"the tool {name} returned what cannot be JSON: {error}; return text") from None


def _called_tools(messages: Sequence[Message]) -> list[str]:
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return [call["function"]["name"] for call in calls]


def _parse_answer(given: Any) -> Answer:
    if isinstance(given, Answer):
        return given
    if given is None:
        return Answer()
    return Answer(messages=[user_message(given)] if isinstance(given, str) else list(given))
