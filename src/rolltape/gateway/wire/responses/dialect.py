"""OpenAI's Responses API. A request has its whole input, or refers to replies of its session by id."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rolltape.errors import EngineFailed, PromptTooLong
from rolltape.gateway.request import ChatRequest
from rolltape.gateway.wire.fields import event
from rolltape.gateway.wire.openai import OpenAIDialect
from rolltape.gateway.wire.protocol import NO_HEADERS, Answers, Route
from rolltape.gateway.wire.responses.items import ItemStream, ResponsesEvent, output_items
from rolltape.gateway.wire.responses.request import RESPONSE_PREFIX, read_counting, read_request
from rolltape.records.jsonable import encode_json
from rolltape.records.turn import Finish

if TYPE_CHECKING:
    from rolltape.gateway.turn.gateway_turn import GatewayTurn


class ResponsesDialect(OpenAIDialect):
    """Responses, as used by Codex and the SDKs."""

    name = "responses"
    routes: tuple[Route, ...] = (
        Route("/v1/responses", Answers.TURN),
        Route("/v1/responses/input_tokens", Answers.COUNT),
    )

    def read_counting(self, body: bytes, path: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        return read_counting(body)

    def counted(self, prompt_tokens: int) -> bytes:
        return encode_json({"object": "response.input_tokens", "input_tokens": prompt_tokens}, "an answer")[0]

    def whole(self, turn: "GatewayTurn") -> bytes:
        return encode_json(_ended(turn, output_items(turn)), "a reply")[0]

    def stream(self, turn: "GatewayTurn", request: ChatRequest) -> "ResponseStream":
        return ResponseStream(turn)


RESPONSES = ResponsesDialect(read_request)


class ResponseStream:
    """A reply as numbered events: reasoning, text, then calls, each as an item."""

    def __init__(self, turn: "GatewayTurn") -> None:
        self._turn = turn
        self._items = ItemStream(turn)
        self._sent = 0

    def opening(self) -> bytes:
        return self._events(*self._in_progress("response.created", "response.in_progress"))

    def reasoning(self, piece: str) -> bytes:
        return self._events(*self._items.reasoning(piece))

    def text(self, piece: str) -> bytes:
        return self._events(*self._items.text(piece))

    def keepalive(self) -> bytes:
        # Codex (0.166) gives up a stream that is idle for 300 s. An event resets its timer, a comment does not.
        return self._events(*self._in_progress("response.in_progress"))

    def closing(self) -> bytes:
        items = output_items(self._turn)
        response = _ended(self._turn, items)
        last = ResponsesEvent(f"response.{response['status']}", {"response": response})
        return self._events(*self._items.closing(items), last)

    def error(self, status: int, message: str, code: str | None = None, *, final: bool = False) -> bytes:
        # Codex (0.166) retries five times after `server_error`, and never after `invalid_prompt`. It compacts its
        # history after `context_length_exceeded`. Of the gateway's errors, only that of a failed engine is worth a
        # retry.
        if status == 429:
            code = "rate_limit_exceeded"
        elif code != PromptTooLong.code:
            code = "server_error" if status == EngineFailed.status and code is None else "invalid_prompt"
        response = _response(self._turn) | {"status": "failed", "error": {"code": code, "message": message}}
        return self._events(ResponsesEvent("response.failed", {"response": response}))

    def _in_progress(self, *names: str) -> list[ResponsesEvent]:
        response = _response(self._turn) | {"status": "in_progress"}
        return [ResponsesEvent(name, {"response": response}) for name in names]

    def _events(self, *events: ResponsesEvent) -> bytes:
        sent = []
        for one in events:
            fields = {"type": one.name, "sequence_number": self._sent} | one.fields
            sent.append(event(encode_json(fields, "an event")[0], one.name))
            self._sent += 1
        return b"".join(sent)


def _ended(turn: "GatewayTurn", items: list[dict[str, Any]]) -> dict[str, Any]:
    ended = _response(turn) | {
        "status": "completed",
        "output": items,
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.held_tokens, "cache_write_tokens": 0},
            "output_tokens": turn.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
            "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
        },
    }
    if turn.is_filtered:
        return ended | {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    if turn.finish in (Finish.STOP, Finish.STOP_STRING):
        return ended
    # The API has no reason for an aborted reply.
    reason = "max_output_tokens" if turn.finish is Finish.LENGTH else None
    return ended | {"status": "incomplete", "incomplete_details": {"reason": reason}}


def _response(turn: "GatewayTurn") -> dict[str, Any]:
    """A response without its outcome. Instructions and tools are not sent back: Codex's are 40 kB, thrice per turn."""
    request = turn.request
    return {
        "id": f"{RESPONSE_PREFIX}{turn.id}",
        "object": "response",
        "created_at": int(turn.received_at),
        "status": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": request.metadata or {},
        "model": turn.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": None if request.after_reply is None else f"{RESPONSE_PREFIX}{request.after_reply}",
        "store": False,
        "temperature": request.sampling.temperature,
        "tool_choice": request.tool_choice.mode,
        "tools": [],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
