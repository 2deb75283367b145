"""OpenAI's Responses API. Nothing is stored: each request brings its whole input."""

from collections.abc import Iterator, Mapping
from typing import Any

from rolltape.errors import EngineFailed
from rolltape.gateway.request import Api, ChatRequest, Draft, Reply
from rolltape.gateway.wire.openai import BETAS, error_body
from rolltape.gateway.wire.protocol import COMMENT, NO_HEADERS, event, with_headers
from rolltape.gateway.wire.responses_items import ResponsesEvent, item_events, output_items
from rolltape.gateway.wire.responses_request import read_ask
from rolltape.records.jsonable import encode_json
from rolltape.records.turn import Finish

_OPENING = ("response.created", "response.in_progress")


class ResponsesDialect:
    """Responses, as Codex and the SDKs speak it."""

    api = Api.RESPONSES

    def read(self, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        return with_headers(read_ask(body), headers, *BETAS)

    def keepalive(self, ask: ChatRequest) -> bytes:
        return COMMENT

    def whole(self, ask: ChatRequest, reply: Reply) -> bytes:
        return encode_json(_ended(ask, reply, output_items(ask, reply)), "a reply")[0]

    def opening(self, ask: ChatRequest, draft: Draft) -> bytes:
        response = _response(ask, draft) | {"status": "in_progress"}
        return b"".join(_sent(ResponsesEvent(name, {"response": response}), at) for at, name in enumerate(_OPENING))

    def closing(self, ask: ChatRequest, reply: Reply) -> Iterator[bytes]:
        items = output_items(ask, reply)
        response = _ended(ask, reply, items)
        events = [made for index, item in enumerate(items) for made in item_events(item, index)]
        events.append(ResponsesEvent(f"response.{response['status']}", {"response": response}))
        for at, one in enumerate(events, len(_OPENING)):
            yield _sent(one, at)

    def error(self, status: int, message: str, code: str | None = None) -> bytes:
        return error_body(status, message, code)

    def error_event(self, status: int, message: str, draft: Draft | None = None) -> bytes:
        # Codex (0.166) asks again five times after `server_error`, and not at all after `invalid_prompt`. Of the
        # errors that the gateway raises only a failed engine's is worth a retry.
        code = "server_error" if status == EngineFailed.status else "invalid_prompt"
        if draft is None:
            return _sent(ResponsesEvent("error", {"code": code, "message": message, "param": None}), 0)
        error = {"code": code, "message": message}
        response = _response(None, draft) | {"status": "failed", "error": error}
        return _sent(ResponsesEvent("response.failed", {"response": response}), len(_OPENING))


RESPONSES = ResponsesDialect()


def _ended(ask: ChatRequest, reply: Reply, items: list[dict[str, Any]]) -> dict[str, Any]:
    usage = reply.usage
    ended = _response(ask, reply.draft) | {
        "status": "completed",
        "output": items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.held_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        },
    }
    if reply.finish in (Finish.STOP, Finish.STOP_STRING):
        return ended
    # The API has no word for a reply that was cut off from outside.
    reason = "max_output_tokens" if reply.finish is Finish.LENGTH else None
    return ended | {"status": "incomplete", "incomplete_details": {"reason": reason}}


def _response(ask: ChatRequest | None, draft: Draft) -> dict[str, Any]:
    """A response without its outcome. Instructions and tools are not sent back: Codex's are 40 kB, thrice a turn."""
    return {
        "id": f"resp_{draft.id}",
        "object": "response",
        "created_at": int(draft.created_at),
        "status": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None if ask is None else ask.sampling.max_tokens,
        "metadata": {},
        "model": draft.model,
        "output": [],
        "parallel_tool_calls": True if ask is None else ask.parallel_tool_calls,
        "previous_response_id": None,
        "store": False,
        "temperature": None if ask is None else ask.sampling.temperature,
        "tool_choice": "auto" if ask is None else ask.tool_choice.mode,
        "tools": [],
        "top_p": None if ask is None else ask.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _sent(one: ResponsesEvent, at: int) -> bytes:
    fields = {"type": one.name, "sequence_number": at} | one.fields
    return event(encode_json(fields, "an event")[0], one.name)
