"""OpenAI's Chat Completions API."""

from collections.abc import Iterator, Mapping
from typing import Any

from rolltape.gateway.request import Api, ChatRequest, Draft, Reply
from rolltape.gateway.wire.chat_request import read_ask
from rolltape.gateway.wire.openai import BETAS, custom_call_input, error_body
from rolltape.gateway.wire.protocol import COMMENT, NO_HEADERS, event, with_headers
from rolltape.records.jsonable import encode_json
from rolltape.records.messages import content_text
from rolltape.records.turn import Finish


class ChatDialect:
    """Chat Completions, with `reasoning_content` for thinking as DeepSeek, vLLM and SGLang have it."""

    api = Api.CHAT

    def read(self, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> ChatRequest:
        return with_headers(read_ask(body), headers, *BETAS)

    def keepalive(self, ask: ChatRequest) -> bytes:
        return COMMENT

    def whole(self, ask: ChatRequest, reply: Reply) -> bytes:
        choice = {"index": 0, "message": _message(ask, reply), "logprobs": None, "finish_reason": _finish_reason(reply)}
        return _encoded(reply.draft, "chat.completion", choices=[choice], usage=_usage(reply))

    def opening(self, ask: ChatRequest, draft: Draft) -> bytes:
        return _chunk(draft, {"role": "assistant", "content": None})

    def closing(self, ask: ChatRequest, reply: Reply) -> Iterator[bytes]:
        message = _message(ask, reply)
        for name in ("reasoning_content", "content"):
            if message.get(name) is not None:
                yield _chunk(reply.draft, {name: message[name]})
        if "tool_calls" in message:
            calls = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
            # llama-index (its OpenAI part, 0.8.3) takes one call of each chunk. Codex (0.29) sends no User-Agent, and
            # takes those of one chunk alone.
            for some in [[call] for call in calls] if ask.client else [calls]:
                yield _chunk(reply.draft, {"tool_calls": some})
        yield _chunk(reply.draft, {}, _finish_reason(reply))
        if ask.include_usage:
            yield event(_encoded(reply.draft, "chat.completion.chunk", choices=[], usage=_usage(reply)))
        yield event(b"[DONE]")

    def error(self, status: int, message: str, code: str | None = None) -> bytes:
        return error_body(status, message, code)

    def error_event(self, status: int, message: str, draft: Draft | None = None) -> bytes:
        return event(error_body(status, message))


CHAT = ChatDialect()


def _message(ask: ChatRequest, reply: Reply) -> dict[str, Any]:
    """The reply's message; content is null where there are calls alone."""
    calls = [_call(ask, call) for call in reply.message.get("tool_calls") or ()]
    text = content_text(reply.message.get("content"))
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning := reply.message.get("reasoning_content") or reply.message.get("reasoning"):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(ask: ChatRequest, call: dict[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    text = custom_call_input(arguments) if name in ask.custom_tools else None
    if text is not None:
        return {"id": call["id"], "type": "custom", "custom": {"name": name, "input": text}}
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(reply: Reply) -> str:
    if reply.finish is Finish.LENGTH:
        return "length"
    # The API has no word for a reply that was cut off from outside; it ends like any other.
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def _usage(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.held_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _chunk(draft: Draft, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return event(_encoded(draft, "chat.completion.chunk", choices=[choice]))


def _encoded(draft: Draft, kind: str, **fields: Any) -> bytes:
    head = {"id": f"chatcmpl-{draft.id}", "object": kind, "created": int(draft.created_at), "model": draft.model}
    return encode_json(head | fields, "a reply")[0]
