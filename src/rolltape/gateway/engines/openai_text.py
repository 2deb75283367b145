"""Any OpenAI-compatible chat endpoint as an engine: messages in, a message out.

Ids and logprobs are recorded if the endpoint returns them, as vLLM does for a request with `return_token_ids` and
`logprobs`. Otherwise there are none, and the turn does not train.

Sampling parameters that are not set are left to the endpoint. A request whose body was kept (`ChatRequest.raw`) is
forwarded with its unknown fields. Any other request is written from its messages and tools.
"""

from contextlib import suppress
from typing import Any

import msgspec

from rolltape.errors import EngineFault
from rolltape.gateway.engines.chat_completion import generated, read_completion
from rolltape.gateway.engines.http import HttpEngine, proxy_for
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.turn.constraints import Ability
from rolltape.gateway.turn.endpoint_replies import OWN
from rolltape.gateway.wire.images import image_part
from rolltape.records.messages import content_text
from rolltape.records.turn import NO_IDS, Finish

# Endpoints refuse keys that they do not know.
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_CALL_KEYS = ("id", "type", "function")
_APPLIES = frozenset(
    {"temperature", "top_p", "seed", "max_tokens", "stop", "presence_penalty", "frequency_penalty"}
)  # top_k and the others are not in OpenAI's API
_NOT_PASSED_ON = frozenset({"stream", "stream_options", "n"})  # each request is for one reply, not streamed
_OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
# The first one has precedence at endpoints. The second one is older, and all but OpenAI's newer models know it.
_LIMITS = ("max_completion_tokens", "max_tokens")


class OpenAITextEngine(HttpEngine):
    """`url` is a base URL as for OpenAI's own clients, such as http://127.0.0.1:8000/v1.

    `model` is the model to request; None for the one that the agent named.
    """

    token_faithful = False
    applies = _APPLIES
    abilities = frozenset[Ability]()  # the endpoint gets the agent's own demands instead
    streams = False

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        super().__init__("openai", url, api_key, proxy_for(url))
        self._model = model
        self._newer_limit: set[str] = set()  # models that refused the older name of the limit

    async def facts(self) -> EngineFacts:
        with suppress(EngineFault):  # the endpoint answers, but does not list its models
            await self._http.get("/models")
        return EngineFacts(model=self._model)

    async def generate(self, wanted: Generation) -> Generated:
        data = await self._answer(wanted)
        if data is None:
            message = {"role": "assistant", "content": ""}
            return Generated(ids=NO_IDS, logprobs=None, finish=Finish.ABORT, message=message)
        where = f"{self.name}, generation {wanted.id}"
        completion, repaired = read_completion(data, where)
        if (error := completion.failure) is not None:
            raise self._http.fault(where, error, status=_status(error))
        return generated(completion, where, repaired=repaired, refusal_as_text=wanted.request.raw is None)

    async def _answer(self, wanted: Generation) -> bytes | None:
        """The endpoint's answer, or None if the generation was aborted."""
        body = self._body(wanted)
        try:
            return await self._post(wanted, body)
        except EngineFault as error:
            raw, (newer, older) = wanted.request.raw or {}, _LIMITS
            is_agents = any(raw.get(name) is not None for name in _LIMITS)
            if is_agents or older not in body or error.status != 400 or newer not in str(error):
                raise
            self._newer_limit.add(body["model"])  # as OpenAI's models that think
        return await self._post(wanted, self._body(wanted))

    async def _post(self, wanted: Generation, body: dict[str, Any]) -> bytes | None:
        return await self._run(wanted.id, self._http.post("/chat/completions", msgspec.json.encode(body)))

    def _body(self, wanted: Generation) -> dict[str, Any]:
        request = wanted.request
        model = self._model or request.model
        newer, older = _LIMITS
        default_limit = newer if model in self._newer_limit else older
        decided = {name: value for name, value in wanted.decided.to_dict().items() if name in _APPLIES}
        limit = decided.pop("max_tokens", None)
        if request.raw is None:
            messages = [_plain_message(message) for message in request.messages]
            body = {"messages": messages, **_tools(request), **_output_form(request), **_effort(request)}
            limit_field = default_limit
        else:
            body = _as_it_came(request.raw, request)
            limit_field = next((name for name in _LIMITS if body.get(name) is not None), default_limit)
        given = decided if limit is None else {**decided, limit_field: limit}
        return {**body, "model": model, **given}


def _as_it_came(raw: dict[str, Any], request: ChatRequest) -> dict[str, Any]:
    """A body without the tools that its session forbids, and without the fields about tools if none is left."""
    allowed = {tool["function"]["name"] for tool in request.all_tools or ()}
    tools = [tool for tool in raw.get("tools") or () if _is_allowed(tool, request, allowed)]
    body = {name: value for name, value in raw.items() if name not in _NOT_PASSED_ON}
    if not tools:
        return {name: value for name, value in body.items() if name not in _OF_TOOLS}
    if isinstance(choice := body.get("tool_choice"), dict) and not _names(choice) <= allowed:
        del body["tool_choice"]
    return {**body, "tools": tools}


def _is_allowed(tool: dict[str, Any], request: ChatRequest, allowed: set[str]) -> bool:
    kind = tool["type"]
    return tool[kind]["name"] in allowed if kind in ("function", "custom") else kind in request.endpoint_tools


def _names(choice: dict[str, Any]) -> set[str]:
    """The tools that a `tool_choice` names: one, or a list of allowed ones."""
    inner = choice.get(choice["type"], choice)
    named = [tool.get(tool["type"], tool) for tool in inner.get("tools") or ()] or [inner]
    return {one["name"] for one in named if "name" in one}


def _status(error: Any) -> int | None:
    """The HTTP status in an error within an answer, or None."""
    codes = (error.get("code"), error.get("status")) if isinstance(error, dict) else ()
    return next((code for code in codes if isinstance(code, int) and 400 <= code < 600), None)


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    plain = {key: message[key] for key in _MESSAGE_KEYS if key in message}
    if message["role"] == "developer":
        plain["role"] = "system"  # OpenAI's name, which others do not know; it takes both
    if isinstance(parts := plain.get("content"), list):
        is_user = message["role"] == "user"  # OpenAI takes images from no other role
        with_images = [(is_user and image_part(part)) or _text_part(part) for part in parts]
        is_text = all(part["type"] == "text" for part in with_images)
        plain["content"] = content_text(parts) if is_text else with_images  # DeepSeek takes no list of texts
    if message["role"] == "assistant" and plain.get("content") is None and not plain.get("tool_calls"):
        plain["content"] = ""  # OpenAI refuses null
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [
            {key: call[key] for key in _CALL_KEYS if key in call} | call.get(OWN, {}) for call in plain["tool_calls"]
        ]
    own: dict[str, Any] = message.get(OWN, {})
    return plain | own


def _text_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]}


def _tools(request: ChatRequest) -> dict[str, Any]:
    if not request.tools:
        return {}
    choice = request.tool_choice
    fields: dict[str, Any] = {"tools": request.tools, "tool_choice": choice.mode}
    if choice.name is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        is_offered = any(tool["function"]["name"] == choice.name for tool in request.tools)
        fields["tool_choice"] = named if is_offered else "auto"
    if not request.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    return fields


def _effort(request: ChatRequest) -> dict[str, Any]:
    if request.thinking is False:
        return {"reasoning_effort": "none"}
    return {} if request.effort is None else {"reasoning_effort": request.effort.word}


def _output_form(request: ChatRequest) -> dict[str, Any]:
    if request.output_schema is None:
        return {}
    schema = request.output_schema.schema
    if schema == {"type": "object"}:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}}
