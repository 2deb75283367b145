"""One seat's conversation with the gateway, over Chat Completions."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import aiohttp
import msgspec

from rolltape.collect.environments.protocol import Connection, Message, Opening
from rolltape.records.jsonable import decode_json, encode_json
from rolltape.records.rollout import StopReason

_OVERFLOW = "context_length_exceeded"
_TURN, _FLAGS = "x-rolltape-turn", "x-rolltape-flags"


class GatewayFault(Exception):
    """The gateway does not answer, or answers with an error. The attempt is broken."""


class TurnsUsedUp(Exception):
    """This session has had its maximum of turns."""


class PromptRefused(Exception):
    """The gateway refuses the prompt, which is far longer than the context."""


class ChatReply(NamedTuple):
    """A reply of the model."""

    message: Message
    turn: str | None
    flags: tuple[str, ...]
    cut: StopReason | None  # why the reply is incomplete, or None

    @property
    def calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = self.message.get("tool_calls") or []
        return calls

    def for_environment(self) -> Message:
        """A copy that an environment may change, with the reply's flags."""
        copy: Message = decode_json(encode_json(self.message, "a reply")[0])
        return copy | {"flags": list(self.flags)} if self.flags else copy


class GatewayConversation:
    """The messages of a seat so far, and the requests for the next one.

    Messages are kept as JSON, so that no environment or tool can change them afterwards.
    """

    def __init__(self, http: aiohttp.ClientSession, connection: Connection, opening: Opening) -> None:
        self._http = http
        self._connection = connection
        self._messages: list[msgspec.Raw] = []
        self._head: dict[str, Any] = {"model": connection.model}
        if opening.tools:
            tools = encode_json([tool.to_chat() for tool in opening.tools], "the tools")[0]
            self._head["tools"] = msgspec.Raw(tools)
        self.add(frozen(opening.messages))

    @property
    def messages(self) -> list[Message]:
        """All messages, as new objects."""
        return [decode_json(bytes(raw)) for raw in self._messages]

    def add(self, messages: Iterable[msgspec.Raw]) -> None:
        self._messages += messages

    async def ask(self) -> ChatReply:
        """Ask for a reply and add it; raises TurnsUsedUp, PromptRefused, or GatewayFault."""
        url = f"{self._connection.openai_base_url}/chat/completions"
        body = msgspec.json.encode({**self._head, "messages": self._messages})
        headers = {"Authorization": f"Bearer {self._connection.key}", "Content-Type": "application/json"}
        try:
            async with self._http.post(url, data=body, headers=headers) as response:
                status, answered = response.status, response.headers
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise GatewayFault(f"the gateway cannot be reached: {type(error).__name__}: {error}") from error
        if status == 429:
            raise TurnsUsedUp
        if status != 200:
            code, reason = _parse_error(raw)
            raise PromptRefused if code == _OVERFLOW else GatewayFault(f"the gateway answered {status}: {reason}")
        given = decode_json(raw)
        (choice,) = given["choices"]
        message = {name: value for name, value in choice["message"].items() if name != "refusal" or value is not None}
        self.add(frozen([message]))
        flags = tuple(flag for flag in answered.get(_FLAGS, "").split(",") if flag)
        cut = _why_cut(choice["finish_reason"], given["usage"], message)
        return ChatReply(message, answered.get(_TURN), flags, cut)


def frozen(messages: Iterable[Message]) -> list[msgspec.Raw]:
    """Messages as JSON."""
    return [msgspec.Raw(encode_json(message, "a message of the environment")[0]) for message in messages]


def _why_cut(finish_reason: str, usage: dict[str, Any], message: Message) -> StopReason | None:
    if finish_reason != "length":
        return None
    # Above the context budget the gateway returns an empty reply. Engines that return only text count no tokens.
    has_content = usage["completion_tokens"] or message.get("content") or message.get("reasoning_content")
    return StopReason.MAX_TOKENS if has_content else StopReason.CONTEXT_OVERFLOW


def _parse_error(raw: bytes) -> tuple[str | None, str]:
    """An error's code, if it has one, and its message."""
    try:
        error = decode_json(raw)["error"]
        return error.get("code"), str(error["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None, raw[:300].decode("utf-8", "replace")
