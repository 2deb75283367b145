"""What a hosted endpoint gets back of its own replies: its ids of calls, and fields that only it knows.

Agents get ids that the gateway mints, since those of endpoints are often not unique. Some endpoints (Mistral's) refuse
ids of another form. Others refuse a call without the signature that they gave it (Gemini), or `reasoning_content` where
they write `reasoning` (Groq). Chat Completions carries such fields; for the other APIs they are put back here.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rolltape.gateway.request import ChatRequest
from rolltape.records.turn import Turn

# In a message or a call: the fields that are put back.
OWN = "endpoint_fields"
_REASONING = "reasoning_content"
_MINTED = re.compile(r"call_[0-9a-f]{24}")
# The fields of a reply and of its calls that all APIs carry.
_COMMON = frozenset({"role", "content", "reasoning_content", "refusal", "tool_calls", "id"})
_COMMON_OF_CALL = frozenset({"id", "type", "function"})
_NOT_OF_AGENTS = frozenset({OWN})

Message = dict[str, Any]


class _Call(NamedTuple):
    id: str  # by the endpoint, or the minted one if that has none, or not a unique one
    fields: dict[str, Any]
    message_fields: dict[str, Any]


class EndpointReplies:
    """The replies of a hosted endpoint in one session."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}  # by minted id
        self._reasoning = _REASONING  # the endpoint's name for it
        self._read = 0  # turns

    def put_into(self, request: ChatRequest, turns: Sequence[Turn]) -> ChatRequest:
        """A request in the endpoint's own terms; `turns` are those of the session so far."""
        self.read(turns)
        if request.raw is None:
            messages = [self._with_fields(message) for message in request.messages]
            return msgspec.structs.replace(request, messages=messages)
        messages = [self._with_ids(message) for message in request.raw["messages"]]
        return msgspec.structs.replace(request, raw={**request.raw, "messages": messages})

    def read(self, turns: Sequence[Turn]) -> bool:
        """Add the replies of a session's turns so far. Return whether there are any calls."""
        for turn in turns[self._read :]:
            if turn.reply is not None and "upstream" in turn.facts.extra:
                self._add(turn.reply.to_dict(), turn.facts.extra)
        self._read = len(turns)
        return bool(self._calls)

    def add_earlier(self, earlier: "EndpointReplies") -> None:
        """Add the calls of an earlier session, whose conversation goes on in this one."""
        self._calls = earlier._calls | self._calls
        self._reasoning = earlier._reasoning

    def knows(self, call_ids: Iterable[str]) -> bool:
        """Whether one of these ids is of a call."""
        return any(self._find(one) is not None for one in call_ids)

    def _add(self, reply: Message, extra: Mapping[str, Any]) -> None:
        if reply.get(_REASONING):
            self._reasoning = extra["upstream"].get("reasoning_field", _REASONING)
        ids, fields = extra.get("call_ids", {}), _without(reply, _COMMON)
        for call in reply.get("tool_calls") or ():
            minted = call["id"]
            self._calls[minted] = _Call(ids.get(minted, minted), _without(call, _COMMON_OF_CALL), fields)

    def _with_ids(self, message: Message) -> Message:
        if message["role"] == "tool":
            known = self._find(message["tool_call_id"])
            return message if known is None else {**message, "tool_call_id": known.id}
        if message["role"] != "assistant" or not (calls := message.get("tool_calls")):
            return message
        pairs = ((call, self._find(call["id"])) for call in calls)
        return {**message, "tool_calls": [call if own is None else {**call, "id": own.id} for call, own in pairs]}

    def _find(self, call_id: str) -> _Call | None:
        """The call with a minted id, which some agents write into ids of their own (kimi-cli 1.12 over Gemini)."""
        found = None if call_id in self._calls else _MINTED.search(call_id)
        return self._calls.get(call_id if found is None else found[0])

    def _with_fields(self, message: Message) -> Message:
        """A message with the endpoint's ids and fields."""
        message = _without(message, _NOT_OF_AGENTS)
        if message["role"] != "assistant":
            return self._with_ids(message)
        calls = [(call, self._find(call["id"])) for call in message.get("tool_calls") or ()]
        fields = next((own.message_fields for _, own in calls if own is not None), {})
        with_own = [call if own is None else {**call, "id": own.id, OWN: own.fields} for call, own in calls]
        message = {**message, "tool_calls": with_own} if calls else message
        if self._reasoning != _REASONING and _REASONING in message:
            fields = {self._reasoning: message[_REASONING], **fields}
            message = _without(message, frozenset({_REASONING}))
        return {**message, OWN: fields} if fields else message


def match_ids(calls: Sequence[Mapping[str, Any]], minted: Sequence[str]) -> dict[str, str]:
    """The endpoint's ids of a reply's calls by the minted ones, without ids that are missing or not unique."""
    counts = Counter(call["id"] for call in calls)
    pairs = zip(minted, (call["id"] for call in calls), strict=True)
    return {one: own for one, own in pairs if own and counts[own] == 1}


def _without(fields: Mapping[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in left_out}
