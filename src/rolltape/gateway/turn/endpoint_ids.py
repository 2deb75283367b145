"""The ids that a hosted endpoint gave its calls.

Agents get ids that the gateway mints, since those of endpoints are often not unique. The endpoint gets its own ids
back: some endpoints (Mistral's) refuse ids of another form.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rolltape.gateway.request import ChatRequest
from rolltape.records.turn import Turn

Message = dict[str, Any]


class EndpointIds:
    """The endpoint's own ids of the calls in a session's replies, by the ids that the gateway minted."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._read = 0  # turns

    def put_into(self, request: ChatRequest, turns: Sequence[Turn]) -> ChatRequest:
        """A request with the endpoint's own ids; `turns` are those of the session so far."""
        for turn in turns[self._read :]:
            self._own |= turn.facts.extra.get("call_ids", {})
        self._read = len(turns)
        if not self._own:
            return request
        messages, raw = [self._replaced(message) for message in request.messages], request.raw
        if raw is not None:
            raw = {**raw, "messages": [self._replaced(message) for message in raw["messages"]]}
        return msgspec.structs.replace(request, messages=messages, raw=raw)

    def _replaced(self, message: Message) -> Message:
        own = self._own
        if message["role"] == "tool":
            return {**message, "tool_call_id": own.get(message["tool_call_id"], message["tool_call_id"])}
        if message["role"] == "assistant" and (calls := message.get("tool_calls")):
            return {**message, "tool_calls": [{**call, "id": own.get(call["id"], call["id"])} for call in calls]}
        return message


def match_ids(calls: Sequence[Mapping[str, Any]], minted: Sequence[str]) -> dict[str, str]:
    """The endpoint's ids of a reply's calls by the minted ones, without ids that are missing or not unique."""
    counts = Counter(call["id"] for call in calls)
    pairs = zip(minted, (call["id"] for call in calls), strict=True)
    return {one: own for one, own in pairs if own and counts[own] == 1}
