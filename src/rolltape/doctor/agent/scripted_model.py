"""A model that follows a script, with ids of a real tokenizer, for running an agent without an engine.

Its replies have parts that agents are known to change when they send them back: thinking, text beside calls, white
space, numbers in arguments, two calls at once, and a word in ids that no tokenizer would choose.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rolltape.doctor.agent.scripted_replies import Message, split_unusually, write_first
from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.request import ChatRequest, SamplingParams
from rolltape.gateway.turn.constraints import Ability
from rolltape.records.turn import Finish, LogprobKind

_COMMANDS = ("echo one", "printf 'größe\\n  5000.0\\n'", "echo two", "echo three")
_SHELLS = ("bash", "exec_command", "shell", "run_shell_command", "execute_command", "terminal", "run", "execute_bash")
_COMMAND_FIELDS = ("command", "cmd", "script", "commands")
_HARMLESS = re.compile(r"^(?:read|list|ls|get|search|view|look|find|glob|grep|calc|think|time|weather)", re.IGNORECASE)
_LOGPROB = -0.5
_PIECES = 4


class ScriptedModel:
    """An engine for a gateway; set `prompts` to those of the gateway once it runs."""

    name = "scripted model"
    token_faithful = True
    applies = frozenset(SamplingParams.__struct_fields__)
    abilities = frozenset[Ability]()
    streams = True
    prompts: ChatPrompts

    def __init__(self) -> None:
        self.replies = 0  # replies to the task itself
        self.called: str | None = None  # the tool that the script calls; None without a harmless one
        self.unwritten: str | None = None  # why a reply cannot be written in this model's form
        self._offers_tools = False

    async def facts(self) -> EngineFacts:
        return EngineFacts(model="scripted", version="0")

    async def generate(self, wanted: Generation) -> Generated:
        ids = self._reply(wanted.request)
        assert wanted.sampling.max_tokens is not None
        whole = len(ids) <= wanted.sampling.max_tokens
        ids = ids[: wanted.sampling.max_tokens]
        if wanted.on_sampled is not None:
            for part in np.array_split(ids, _PIECES):
                wanted.on_sampled(part.tolist())
        return Generated(
            ids=ids,
            logprobs=np.full(len(ids), _LOGPROB),
            finish=Finish.STOP if whole else Finish.LENGTH,
            first_version="0",
            last_version="0",
            logprob_kind=LogprobKind.RAW,
        )

    async def abort(self, generation_id: str) -> None:
        return

    async def close(self) -> None:
        return

    def _reply(self, request: ChatRequest) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        tools = request.all_tools
        aside = self._offers_tools and not tools  # side requests of agents, such as for a title or a summary
        self._offers_tools |= bool(tools)
        if aside:
            message: Message = {"role": "assistant", "content": "A small task."}
        else:
            call = None if request.tool_choice.mode == "none" else harmless_call(tools or [])
            self.called = self.called or (None if call is None else call[0])
            message = STEPS[min(self.replies, len(STEPS) - 1)](call)
            self.replies += 1
        ids = write_first(self.prompts, reply_forms(message), tools, request.thinking)
        if ids is not None:
            return split_unusually(self.prompts, ids)
        self.unwritten = f"renderer {self.prompts.renderer} renders no reply after its prompt"
        raise EngineFault(f"{self.name}: {self.unwritten}", status=400)


_Call = tuple[str, str | None, dict[str, Any]]  # a tool's name, its field for a command, and its other arguments


def harmless_call(tools: list[dict[str, Any]]) -> _Call | None:
    """A harmless call of a tool: of one that runs a command, with a harmless command, or of one that only reads."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    by_rank = sorted(functions, key=lambda one: one["name"].lower() not in _SHELLS)
    for function in by_rank:
        properties = _properties(function)
        field = next((name for name in _COMMAND_FIELDS if name in properties), None)
        if field is not None:
            return function["name"], field, _required(function, besides=field)
    looking = next((one for one in functions if _HARMLESS.match(one["name"])), None)
    return None if looking is None else (looking["name"], None, _required(looking))


def _properties(function: dict[str, Any]) -> dict[str, Any]:
    properties = (function.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(function: dict[str, Any], besides: str | None = None) -> dict[str, Any]:
    """The minimal arguments by the schema of a tool."""
    properties = _properties(function)
    names = (function.get("parameters") or {}).get("required") or ()
    return {name: _least(properties.get(name) or {}) for name in names if name != besides}


def _least(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    plain: dict[object, Any] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}
    return plain.get(kind[0] if isinstance(kind, list) else kind, ".")


def _calls(call: _Call | None, *commands: str) -> Iterator[dict[str, Any]]:
    for at, command in enumerate(commands if call else ()):
        assert call is not None
        name, field, rest = call
        arguments = rest if field is None else {field: command, **rest}
        yield {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}


def reply_forms(message: Message) -> list[Message]:
    """A reply in different forms, since some models always think, or never, or call only one tool at a time."""
    thought = {**message, "reasoning_content": message.get("reasoning_content") or "Well."}
    plain = {name: value for name, value in message.items() if name != "reasoning_content"}
    forms = [message if message.get("reasoning_content") else plain, thought, plain]
    one_call = [{**one, "tool_calls": one["tool_calls"][:1]} for one in forms if "tool_calls" in one]
    text_alone = [{**one, "tool_calls": []} for one in (thought, plain)]
    return [*forms, *one_call, *text_alone]


def _assistant(text: str, thought: str | None = None, *calls: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": text, "reasoning_content": thought}
    return {**message, "tool_calls": list(calls)} if calls else message


# The replies for the task in order. Without a tool to call, they are texts.
STEPS: tuple[Callable[[_Call | None], Message], ...] = (
    lambda call: _assistant("I will look around first.\n\n", "Let me see what is here.", *_calls(call, _COMMANDS[0])),
    lambda call: (
        _assistant("", "Now the numbers.", *_calls(call, _COMMANDS[1]))
        if call
        else _assistant("The numbers are 5000.0.")
    ),
    lambda call: _assistant("Both at once.", None, *_calls(call, *_COMMANDS[2:])),
    lambda call: _assistant("Everything is  done, with two spaces.\n", "That was all."),
)
