"""An engine that answers with bytes made beforehand, in SGLang's form and in vLLM's chat form: it costs little.

`python -m benchmarks.instant IDS [CONTEXT]` prints its address and answers every request with these ids
(comma-separated). A reply that is streamed comes id by id: the first at once, the others at a steady pace.
"""

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import uvloop

_BYTES_A_TOKEN = 4  # of a body, for the prompt ids that vLLM's chat form repeats
_REPLY_TEXT = "I look at the next file and see what it holds."
_STREAMS = re.compile(rb'"stream": ?true')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PACE_S = 0.002  # between the ids of a stream
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

Answer = bytes | Sequence[bytes]  # a whole answer, or the pieces of a streamed one


class Answers:
    """What is answered to each path."""

    def __init__(self, ids: list[int], context: int) -> None:
        logprobs = [-0.125 - index / 64 for index in range(len(ids))]
        triples: list[list[object]] = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
        self._generated = _whole(_generated(triples, len(ids), ended=True))
        self._events = _pieces([_generated([one], at, ended=at == len(ids)) for at, one in enumerate(triples, 1)])
        self._chunks = _pieces(
            [_chunk(token, logprob, at == len(ids)) for at, (logprob, token, _) in enumerate(triples, 1)]
        )
        self._choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": _REPLY_TEXT},
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for token, logprob in zip(ids, logprobs, strict=True)
                ]
            },
        }
        facts = {"model_path": "instant", "weight_version": "1", "context_length": context}
        self._facts = _whole(json.dumps(facts | {"incremental_streaming_output": True}).encode())
        self._counter = itertools.count()
        self._by_path: dict[bytes, Callable[[bytes], Answer]] = {
            b"/generate": self._generate,
            b"/v1/chat/completions": self._chat,
        }

    def to(self, path: bytes, body: bytes) -> Answer:
        answer = self._by_path.get(path)
        return self._facts if answer is None else answer(body)

    def _generate(self, body: bytes) -> Answer:
        return self._events if _STREAMS.search(body) else self._generated

    def _chat(self, body: bytes) -> Answer:
        if _STREAMS.search(body):
            return self._chunks
        tokens = len(body) // _BYTES_A_TOKEN
        reply = {
            "id": f"chatcmpl-{next(self._counter)}",
            "object": "chat.completion",
            "created": 0,
            "model": "instant",
            "prompt_token_ids": list(range(1000, 1000 + tokens)),
            "choices": [self._choice],
            "usage": {"prompt_tokens": tokens, "completion_tokens": len(self._choice["token_ids"]), "total_tokens": 1},
        }
        return _whole(msgspec.json.encode(reply))


def _generated(triples: list[list[object]], completion_tokens: int, *, ended: bool) -> bytes:
    """A reply of SGLang's, or one event of it."""
    ids = [token for _, token, _ in triples]
    meta = {
        "id": "instant",
        "finish_reason": {"type": "stop", "matched": ids[-1]} if ended else None,
        "prompt_tokens": 1,
        "completion_tokens": completion_tokens,
        "cached_tokens": 0,
        "weight_version": "1",
        "output_token_logprobs": triples,
    }
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


def _chunk(token: object, logprob: object, ended: bool) -> bytes:
    """One event of a chat reply as vLLM gives it when it is asked for ids and logprobs."""
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": "I look "},
        "token_ids": [token],
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": logprob}]},
        "finish_reason": "stop" if ended else None,
    }
    return json.dumps({"id": "1", "object": "chat.completion.chunk", "model": "instant", "choices": [choice]}).encode()


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _pieces(events: Sequence[bytes]) -> list[bytes]:
    """The writes of a streamed answer: its head goes with the first event, its end with the last."""
    lines = [b"data: %b\n\n" % event for event in events]
    chunks = [b"%x\r\n%b\r\n" % (len(line), line) for line in lines]
    chunks[-1] += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    return [_STREAM_HEAD + chunks[0], *chunks[1:]]


class Connection(asyncio.Protocol):
    """One client's requests, one after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._came = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of a class of their own

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._came += data
        while (end := self._came.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._came[:end])
            length = _LENGTH.search(head)
            whole = end + 4 + (0 if length is None else int(length[1]))
            if len(self._came) < whole:
                return
            body = bytes(self._came[end + 4 : whole])
            del self._came[:whole]
            self._answer(self._answers.to(head.split(b" ", 2)[1].partition(b"?")[0], body))

    def _answer(self, answer: Answer) -> None:
        if isinstance(answer, bytes):
            self._transport.write(answer)
        else:
            self._send(answer, 0)

    def _send(self, pieces: Sequence[bytes], at: int) -> None:
        self._transport.write(pieces[at])
        if at + 1 < len(pieces):
            self._timer = asyncio.get_running_loop().call_later(_PACE_S, self._send, pieces, at + 1)


async def _serve(ids: list[int], context: int = 10_000_000) -> None:
    answers = Answers(ids, context)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve([int(token) for token in sys.argv[1].split(",")], *map(int, sys.argv[2:])))
