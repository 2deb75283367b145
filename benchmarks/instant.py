"""An engine that answers at once, in SGLang's form and in vLLM's chat form: what is left is a gateway's own cost.

`python -m benchmarks.instant IDS [CONTEXT]` prints its address and answers every request with these ids
(comma-separated). A reply that is streamed comes id by id: the first at once, the others at a steady pace.
"""

import asyncio
import itertools
import json
import re
import sys

import msgspec
import uvloop
from aiohttp import web

_BYTES_A_TOKEN = 4  # of a body, for the prompt ids that vLLM's chat form repeats
_REPLY_TEXT = "I look at the next file and see what it holds."
_STREAMS = re.compile(rb'"stream": ?true')
_PACE_S = 0.002  # between the ids of a stream


def make_app(ids: list[int], context: int) -> web.Application:
    logprobs = [-0.125 - index / 64 for index in range(len(ids))]
    triples: list[list[object]] = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    generated = _generated(triples, len(ids), ended=True)
    events = [_generated([one], at, ended=at == len(ids)) for at, one in enumerate(triples, 1)]
    chunks = [_chunk(token, logprob, at == len(ids)) for at, (logprob, token, _) in enumerate(triples, 1)]
    counter = itertools.count()

    async def generate(request: web.Request) -> web.StreamResponse:
        if _STREAMS.search(await request.read()):
            return await _streamed(request, events)
        return web.Response(body=generated, content_type="application/json")

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if _STREAMS.search(body):
            return await _streamed(request, chunks)
        reply = {
            "id": f"chatcmpl-{next(counter)}",
            "object": "chat.completion",
            "created": 0,
            "model": "instant",
            "prompt_token_ids": list(range(1000, 1000 + len(body) // _BYTES_A_TOKEN)),
            "choices": [
                {
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
            ],
            "usage": {"prompt_tokens": len(body) // _BYTES_A_TOKEN, "completion_tokens": len(ids), "total_tokens": 1},
        }
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    async def info(_: web.Request) -> web.Response:
        facts = {"model_path": "instant", "weight_version": "1", "context_length": context}
        return web.json_response(facts | {"incremental_streaming_output": True})

    app = web.Application(client_max_size=2**30)
    app.add_routes([web.post("/generate", generate), web.post("/v1/chat/completions", chat)])
    app.add_routes([web.get(path, info) for path in ("/health", "/model_info", "/get_model_info", "/get_server_info")])
    app.add_routes([web.get("/server_info", info), web.get("/v1/models", info), web.post("/abort_request", generate)])
    return app


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


async def _streamed(request: web.Request, events: list[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number, event in enumerate(events):
        await asyncio.sleep(_PACE_S if number else 0)
        await response.write(b"data: " + event + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _serve(ids: list[int], context: int = 10_000_000) -> None:
    runner = web.AppRunner(make_app(ids, context), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve([int(token) for token in sys.argv[1].split(",")], *map(int, sys.argv[2:])))
