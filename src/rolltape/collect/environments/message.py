"""Several turns: tools that are Python functions, or a Python function that plays the other side."""

from collections.abc import Generator, Sequence
from typing import Annotated, Any

import msgspec

from rolltape.collect.environments.checks import checked, checks_of
from rolltape.collect.environments.fields import entry_of, fields_of
from rolltape.collect.environments.handling import Handled, Mishaps
from rolltape.collect.environments.prompts import check_prompt, opening_of, user
from rolltape.collect.environments.protocol import AGENT, Answer, Ended, Episode, Message, Opening, Score, Tool
from rolltape.collect.environments.scoring import score_of_unfinished
from rolltape.collect.environments.script import Script
from rolltape.collect.environments.tools import Described, ToolAnswer, ToolSpec, described
from rolltape.collect.functions import function_named
from rolltape.collect.tasks import Task
from rolltape.collect.threads import called
from rolltape.errors import RecordError, TaskError
from rolltape.records.jsonable import as_float
from rolltape.records.messages import content_text
from rolltape.records.rollout import StopReason
from rolltape.records.turn import TurnFlag

# By the flag of a reply that has a call which is delivered as text: what the model is told.
_TOLD = {
    TurnFlag.MALFORMED_CALL: "Your tool call could not be read. Write one complete call with its arguments as JSON.",
    TurnFlag.DENIED_TOOL: "That tool may not be called.",
}


class MessageFields(Handled, frozen=True, kw_only=True):
    """Fields of a task of this kind."""

    tools: list[str | ToolSpec] = []
    episode: str | None = None  # "python:module:function"
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None


class MessageEnvironment:
    """Goes on until the model answers without a call, or the episode function is through."""

    name = "message"

    def check(self, task: Task) -> None:
        fields = fields_of(task, MessageFields)
        check_prompt(fields, needed=fields.episode is None)
        names = [described(tool).name for tool in fields.tools]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise TaskError(f"its tools {', '.join(sorted(repeated))} stand there twice; give each its own name")
        if fields.episode is not None:
            function_named(fields.episode)
            if fields.answer is not None or fields.check is not None:
                raise TaskError("it has an episode function, which rewards, and an answer or check; keep one of them")
        elif fields.answer is not None or fields.check is not None:
            checks_of(fields)
        elif not fields.tools:
            raise TaskError('it has neither tools nor an answer to check nor an episode; add "tools" or "episode"')

    def begin(self, task: Task, seed: int) -> Episode:
        fields = fields_of(task, MessageFields)
        if fields.episode is None:
            return Conversation(task, fields, None)
        made: Any = function_named(fields.episode)(entry_of(task), seed)
        if isinstance(made, Generator):
            return Conversation(task, fields, Script(made, fields.episode))
        if not hasattr(made, "next_seat"):
            kind = type(made).__name__
            raise TaskError(f"{fields.episode} returned something of type {kind}; let it yield, or return an Episode")
        episode: Episode = made
        return episode


class Conversation:
    """One attempt: the model, its tools, and perhaps a script for the other side."""

    seats = (AGENT,)

    def __init__(self, task: Task, fields: MessageFields, script: Script | None) -> None:
        self._task = task
        self._fields = fields
        self._script = script
        self._tools = [described(tool) for tool in fields.tools]
        self._mishaps = Mishaps(fields)
        self._tool_reward = 0.0
        self._fault: RecordError | None = None  # what is wrong with a tool, whoever calls it
        self._over = False

    def opening(self, seat: str) -> Opening:
        opening = opening_of(self._fields, [self._tool(tool) for tool in self._tools], self._fields.max_tool_calls)
        if self._script is not None:
            opening.messages.extend(self._script.first)
        return opening

    def next_seat(self) -> str | None:
        return None if self._over else AGENT

    async def answer(self, seat: str, reply: Message) -> Answer:
        text = content_text(reply.get("content"))
        unreadable = [flag for flag in reply.get("flags", ()) if flag in _TOLD]
        if unreadable:
            return self._unreadable(_TOLD[unreadable[0]], text)
        answer = Answer(done=True) if self._script is None else await self._script.answer(text)
        self._over = answer.done
        return answer

    async def score(self, seat: str, ended: Ended) -> Score:
        if self._fault is not None:
            raise self._fault
        for name in _called(ended.messages[len(self.opening(seat).messages) :]):
            if all(name != tool.name for tool in self._tools):
                self._mishap("malformed", name)  # the agent has told the model that there is no such tool
        score = await self._score(ended)
        data = dict(score.reward_data or {})
        if self._mishaps.counts:
            data["mishaps"] = dict(self._mishaps.counts)
        if not self._tool_reward:
            return msgspec.structs.replace(score, reward_data=data or None)
        terms = {**score.terms, "tools": self._tool_reward}
        reward = None if score.reward is None else score.reward + self._tool_reward
        return msgspec.structs.replace(score, reward=reward, terms=terms, reward_data=data or None)

    async def _score(self, ended: Ended) -> Score:
        by_policy = self._mishaps.ended_by is not None
        unfinished = score_of_unfinished(self._fields, StopReason.PARSE_ERROR if by_policy else ended.stop_reason)
        if unfinished is not None:
            if self._script is not None:
                self._script.close()
            return unfinished
        if self._script is not None:
            return self._script.score
        if self._fields.answer is None and self._fields.check is None:
            return Score(reward=0.0)  # the tools reward
        return await checked(checks_of(self._fields), entry_of(self._task), ended)

    def _unreadable(self, told: str, text: str) -> Answer:
        handling = self._mishaps.count("malformed")
        self._over = self._mishaps.ended_by is not None
        return Answer(
            messages=() if self._over else [user(told)],
            done=self._over,
            reward=handling.reward,
            stop_reason=StopReason.PARSE_ERROR,
            reward_data={"malformed": text},
        )

    def _tool(self, tool: Described) -> Tool:
        async def function(**arguments: Any) -> str:
            try:
                fitting = tool.fitted(arguments)
            except msgspec.ValidationError as error:
                return self._mishap("malformed", f"{tool.name}: {error}")
            try:
                result = await called(tool.function, **fitting)
            except Exception as error:  # noqa: BLE001 - its arguments are the model's: whatever it raises is an outcome
                return self._mishap("tool_error", str(error) or type(error).__name__)
            try:
                return self._heard(tool.name, result)
            except RecordError as error:
                # Nothing of the model's doing: the attempt is broken, and ends here.
                self._fault, self._over = error, True
                return f"error: {error}"

        return Tool(tool.name, tool.description, tool.parameters, function)

    def _mishap(self, kind: str, told: str) -> str:
        self._tool_reward += self._mishaps.count(kind).reward
        self._over = self._over or self._mishaps.ended_by is not None
        return f"error: {told}"

    def _heard(self, name: str, result: Any) -> str:
        if isinstance(result, ToolAnswer):
            self._tool_reward += as_float(result.reward, f"the tool {name}: the reward")
            self._over = self._over or result.done
            return result.text
        try:
            return result if isinstance(result, str) else msgspec.json.encode(result).decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(f"the tool {name} returned what cannot be JSON: {error}; return text") from None


def _called(messages: Sequence[Message]) -> list[str]:
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return [call["function"]["name"] for call in calls]
