"""An engine that says what a test tells it to, in SGLang's protocol, over a real socket.

It gives the text in token splits that no tokenizer would choose, with made-up logprobs that it remembers, and
checks by itself that each prompt of a conversation begins with all that it was given and gave before.
"""

import asyncio
import contextlib
import enum
import json
import random
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from aiohttp import web
from tokenizers import Tokenizer

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Mishap(enum.Enum):
    """What may go wrong with a request."""

    ERROR_500 = "it is answered with an error"
    HANG = "it is never answered, unless it is aborted"
    TRUNCATED = "the answer, or the first event of a stream, is half a JSON"
    TRUNCATED_LATE = "the answer, or the last event of a stream, is half a JSON"
    WRONG_LENGTHS = "a logprob is missing, also in the first event of a stream"
    WRONG_LENGTHS_LATE = "a logprob is missing, in the last event of a stream"
    NO_STOP_ID = "the id that ended the reply is trimmed"
    FREEZES = "from then on nothing is answered, until `thaw`; a stream stops in its middle"
    GOES = "from then on connections are refused, until `listen`; a stream breaks in its middle"
    DIES = "the connection closes in the middle of the answer"
    ABORTED = "it ends half way, as by a change of weights"
    ABORTED_AT_ONCE = "it ends before the first token"
    ABORTED_AT_STOP = "it is aborted when the stop id has just been sampled"
    OUTSIDE_VOCABULARY = "an id is none of the tokenizer's"
    AFTER_STOP = "ids follow the stop id"
    TOO_MANY = "more ids come than were asked for"
    ABOVE_ZERO = "a logprob is above zero"
    REFUSED = "it is answered with 400"
    BUSY = "it is answered with 503, to be asked again after 7 s"


_TRUNCATED = (Mishap.TRUNCATED, Mishap.TRUNCATED_LATE)
_WRONG_LENGTHS = (Mishap.WRONG_LENGTHS, Mishap.WRONG_LENGTHS_LATE)
_LATE = (Mishap.TRUNCATED_LATE, Mishap.WRONG_LENGTHS_LATE)
IMPLAUSIBLE = (Mishap.OUTSIDE_VOCABULARY, Mishap.AFTER_STOP, Mishap.TOO_MANY, Mishap.ABOVE_ZERO)


class Step(NamedTuple):
    """One reply: its text, special tokens spelled out. The end-of-turn is added unless it ends otherwise."""

    text: str
    finish: str = "stop"  # or "length", or a stop string that ends it: then no end-of-turn follows
    token_delay_s: float = 0.0


class Asked(NamedTuple):
    """A request as a script sees it."""

    number: int  # from 0, over all conversations
    prompt_ids: list[int]
    prompt: str
    body: Json


class Said(NamedTuple):
    """What was given for a request."""

    asked: Asked
    ids: list[int]
    logprobs: list[float]
    version: str
    finish: str
    cached_tokens: int
    conversation: Hashable


class Unfinished(NamedTuple):
    """A reply of which a part was given, and which goes on where a prompt has that part, or more of what was sent."""

    step: Step
    prompt_ids: list[int]
    whole: list[int]
    least: int  # of it that a prompt must have
    is_next: bool  # the script does not count it as given yet


class Reply(NamedTuple):
    """What is to be sent for a request: all ids, and how it ends."""

    asked: Asked
    ids: list[int]
    logprobs: list[float]
    finish: str
    cached_tokens: int


Script = Sequence[str | Step] | Callable[[Asked], str | Step]


class ScriptedEngine:
    """`async with ScriptedEngine(tokenizer, script) as engine:` serves at `engine.url` until the block ends.

    `conversation` says to which conversation a request belongs, None for one that stands alone. With `incremental`,
    events of a stream have what is new alone, as those of SGLang with --incremental-streaming-output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *,
        unusual: bool = True,
        end_of_turn: str = "<|im_end|>",
        seed: int = 0,
        version: str = "v0",
        context: int = 131_072,
        incremental: bool = False,
        conversation: Callable[[Asked], Hashable] = lambda asked: "the only one",
    ) -> None:
        end_id = tokenizer.token_to_id(end_of_turn)
        assert end_id is not None, f"{end_of_turn} is not in the vocabulary"
        self.tokenizer = tokenizer
        self.end_id: int = end_id
        self.version = version
        self.said: list[Said] = []
        self.violations: list[str] = []
        self.aborted: list[str] = []
        self.loaded: list[str] = []  # folders of weights
        self.flushed = 0  # how often it forgot its prefixes
        self.mishaps: dict[int, Mishap] = {}  # by the number of the request
        self.unknown_logprobs: frozenset[int] = frozenset()  # places in a reply whose logprob is given as null
        self.requests = 0
        self.most_at_once = 0
        self.looks = 0  # how often it was asked whether it is healthy
        self.url = ""
        self._script = script
        self._splits = Splits(tokenizer, random.Random(seed)) if unusual else None
        self._chance = random.Random(seed + 1)
        self._context = context
        self.allowance: asyncio.Semaphore | None = None  # each id waits for one; None: it comes at once
        self._incremental = incremental
        self._conversation = conversation
        self._held: dict[Hashable, list[int]] = {}
        self._unfinished: dict[Hashable, Unfinished] = {}
        self._next_step = 0
        self._running: dict[str, asyncio.Event] = {}
        self._takes = asyncio.Event()
        self._takes.set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._loads = asyncio.Event()
        self._loads.set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()

    async def listen(self) -> None:
        """Take connections, at the same address as before."""
        app = web.Application(client_max_size=2**30, middlewares=[self._wait_while_frozen])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/update_weight_version", self._update)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/v1/models", self._models)
        for prefix in ("/", "/get_"):
            app.router.add_get(f"{prefix}model_info", self._model_info)
            app.router.add_get(f"{prefix}server_info", self._server_info)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def refuse(self) -> None:
        """Drop every connection and refuse further ones, until `listen`."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def freeze(self) -> None:
        """Take requests and answer none, until `thaw`."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Answer again after `Mishap.FREEZES`, or go on with loading weights."""
        self._thawed.set()
        self._loads.set()

    def hold_loads(self) -> None:
        """Take as long to load weights as it takes until `thaw`."""
        self._loads.clear()

    @web.middleware
    async def _wait_while_frozen(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.looks += request.path == "/health"
        await self._thawed.wait()
        response: web.StreamResponse = await handler(request)
        return response

    @contextlib.contextmanager
    def in_thread(self) -> "Iterator[ScriptedEngine]":
        """The same for a test that is no coroutine: the engine has an event loop of its own."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="scripted-engine", daemon=True)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self.listen(), loop).result(10)
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self.refuse(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def text_of(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: Json = json.loads(await request.read())
        prompt_ids: list[int] = body["input_ids"]
        asked = Asked(self.requests, prompt_ids, self.text_of(prompt_ids), body)
        self.requests += 1
        conversation = self._conversation(asked)
        cached = self._look_at_prompt(asked, conversation)
        mishap = self.mishaps.get(asked.number)
        if mishap is Mishap.ERROR_500:
            return web.json_response({"error": {"message": "the script says so"}}, status=500)
        if mishap is Mishap.REFUSED:
            return web.json_response({"error": "no such thing"}, status=400)
        if mishap is Mishap.BUSY:
            return web.json_response({"error": "busy"}, status=503, headers={"Retry-After": "7"})
        if not body.get("stream"):
            await self._vanish(mishap)
        await self._takes.wait()
        aborted = self._running[body["rid"]] = asyncio.Event()
        self.most_at_once = max(self.most_at_once, len(self._running))
        try:
            return await self._answer(request, asked, mishap, aborted, cached, conversation)
        finally:
            del self._running[body["rid"]]

    async def _vanish(self, mishap: Mishap | None) -> None:
        if mishap is Mishap.FREEZES:
            self._thawed.clear()
            await self._thawed.wait()
        if mishap is Mishap.GOES:
            self._going = asyncio.ensure_future(self.refuse())
            await asyncio.Event().wait()

    def _look_at_prompt(self, asked: Asked, conversation: Hashable) -> int:
        """How much of the prompt is known; less than all that was held before is a violation."""
        held = [] if conversation is None else self._held.get(conversation, [])
        ids = asked.prompt_ids
        shared = next((at for at, (old, new) in enumerate(zip(held, ids, strict=False)) if old != new), None)
        shared = min(len(held), len(ids)) if shared is None else shared
        if shared < len(held):
            was, now = self.text_of(held[shared : shared + 8]), self.text_of(ids[shared : shared + 8])
            self.violations.append(
                f"request {asked.number} departs at id {shared} of {len(held)}: {was!r} was held, {now!r} came"
            )
        return shared

    async def _answer(
        self,
        request: web.Request,
        asked: Asked,
        mishap: Mishap | None,
        aborted: asyncio.Event,
        cached: int,
        conversation: Hashable,
    ) -> web.StreamResponse:
        version = self.version
        step, whole, is_next = self._step(asked, conversation)
        ids, finish = whole, step.finish
        params = asked.body["sampling_params"]
        assert finish != "stop" or self.end_id in params["stop_token_ids"], params
        if len(ids) > params["max_new_tokens"]:
            ids, finish = ids[: params["max_new_tokens"]], "length"
        if mishap is Mishap.ABORTED_AT_ONCE:
            aborted.set()
        if mishap is Mishap.ABORTED:
            ids, finish = ids[: len(ids) // 2], "abort"
        logprobs = [-self._chance.expovariate(2.0) for _ in ids]
        reply = Reply(asked, ids, logprobs, finish, cached)
        stream = None
        if asked.body.get("stream"):
            # Whatever becomes of it, the client has a part, and may go on from there.
            self._unfinished[conversation] = Unfinished(step, asked.prompt_ids, whole, 0, is_next)
            stream = EventStream(self, self._garbled(reply, mishap), mishap, incremental=self._incremental)
            await stream.begin(request)
        if mishap is Mishap.HANG:
            await aborted.wait()
        count = await self._sample(reply, mishap, step.token_delay_s, aborted, stream)
        if aborted.is_set():
            reply = reply._replace(ids=ids[:count], logprobs=logprobs[:count], finish="abort")
        self.said.append(Said(asked, reply.ids, reply.logprobs, version, reply.finish, cached, conversation))
        if mishap not in (*_TRUNCATED, *_WRONG_LENGTHS, Mishap.DIES, *IMPLAUSIBLE):
            self._next_step += is_next
            kept = reply.ids[:-1] if mishap is Mishap.NO_STOP_ID else reply.ids
            self._held[conversation] = asked.prompt_ids + kept
            self._unfinished.pop(conversation, None)
            if reply.finish == "abort":
                self._unfinished[conversation] = Unfinished(step, asked.prompt_ids, whole, len(kept), False)
        elif mishap in IMPLAUSIBLE:
            self._unfinished.pop(conversation, None)
        # What was not delivered whole is asked for again, or from where it broke off, and binds nobody.
        sent = self._garbled(reply, mishap)
        return await (self._deliver(request, sent, mishap) if stream is None else stream.end(request, sent))

    async def _sample(
        self,
        reply: Reply,
        mishap: Mishap | None,
        delay_s: float,
        aborted: asyncio.Event,
        stream: "EventStream | None",
    ) -> int:
        """How many ids were sampled, all of them unless it was aborted; a stream is sent them meanwhile."""
        for sampled in range(len(reply.ids)):
            if aborted.is_set():
                return sampled
            if stream is not None and sampled == len(reply.ids) // 2:
                await self._vanish(mishap)
            if delay_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), delay_s)
            if self.allowance is not None:
                waits = [asyncio.ensure_future(one) for one in (self.allowance.acquire(), aborted.wait())]
                _, waiting = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waiting:
                    wait.cancel()
            if stream is not None and not aborted.is_set():
                await stream.sampled(sampled + 1)
        return len(reply.ids)

    def _step(self, asked: Asked, conversation: Hashable) -> tuple[Step, list[int], bool]:
        """A reply and whether it is the script's next, or else what is left of one that was interrupted."""
        unfinished = self._unfinished.get(conversation)
        if unfinished is not None:
            step, prompt_ids, whole, least, is_next = unfinished
            part = asked.prompt_ids[len(prompt_ids) :]
            if asked.prompt_ids == prompt_ids + whole[: len(part)] and len(part) >= least:
                return step, whole[len(part) :], is_next
        given = self._script(asked) if callable(self._script) else self._script[self._next_step]
        step = given if isinstance(given, Step) else Step(given)
        return step, self._ids(step), True

    def _ids(self, step: Step) -> list[int]:
        if self._splits is None:
            ids: list[int] = self.tokenizer.encode(step.text, add_special_tokens=False).ids
        else:
            ids = self._splits.of(step.text)
        assert self.text_of(ids) == step.text
        return [*ids, self.end_id] if step.finish == "stop" else ids

    def _garbled(self, reply: Reply, mishap: Mishap | None) -> Reply:
        """The reply as it is sent."""
        asked, ids, logprobs, finish, _ = reply
        match mishap:
            case Mishap.NO_STOP_ID:
                ids, logprobs = ids[:-1], logprobs[:-1]
            case Mishap.OUTSIDE_VOCABULARY:
                ids = [900_000, *ids[1:]]
            case Mishap.AFTER_STOP:
                ids, logprobs = [*ids, *ids], [*logprobs, *logprobs]
            case Mishap.TOO_MANY:
                most = asked.body["sampling_params"]["max_new_tokens"]
                ids, logprobs, finish = [ids[0]] * (most + 50), [-0.5] * (most + 50), "length"
            case Mishap.ABOVE_ZERO:
                logprobs = [0.5, *logprobs[1:]]
            case Mishap.ABORTED_AT_STOP:
                finish = "abort"
        return reply._replace(ids=ids, logprobs=logprobs, finish=finish)

    def answer(self, reply: Reply, mishap: Mishap | None, since: int = 0, until: int | None = None) -> bytes:
        """SGLang's JSON: of a whole reply, or of an event with the ids from `since` on, `until` which it has come."""
        count = len(reply.ids) if until is None else until
        ids = reply.ids[since:count]
        logprobs = [None if at in self.unknown_logprobs else value for at, value in enumerate(reply.logprobs[:count])][
            since:
        ]
        triples = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        if mishap in _WRONG_LENGTHS and (until is None or mishap not in _LATE):
            triples = triples[:-1]
        reasons: dict[str, Json] = {
            "stop": {"type": "stop", "matched": self.end_id},
            "length": {"type": "length", "length": count},
            "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        }
        matched = {"type": "stop", "matched": reply.finish}
        answer = {
            "text": self.text_of(ids),
            "output_ids": ids,
            "meta_info": {
                "id": reply.asked.body["rid"],
                "finish_reason": reasons.get(reply.finish, matched) if until is None else None,
                "prompt_tokens": len(reply.asked.prompt_ids),
                "completion_tokens": count,
                "cached_tokens": reply.cached_tokens,
                "weight_version": self.version,
                "output_token_logprobs": triples,
                "output_token_logprobs_length": count,
                **self._tops(reply, since, count),
            },
        }
        data = json.dumps(answer).encode()
        return data[: len(data) // 2] if mishap in _TRUNCATED and (until is None or mishap not in _LATE) else data

    def _tops(self, reply: Reply, since: int, count: int) -> Json:
        """The most likely ids at each place: the sampled one, and made-up ones after it."""
        most = reply.asked.body.get("top_logprobs_num") or 0
        rows = [
            [[logprob - place, (token + place) % self.end_id if place else token, None] for place in range(most)]
            for token, logprob in zip(reply.ids[:count], reply.logprobs[:count], strict=True)
        ]
        return {"output_top_logprobs": rows[since:]} if most else {}

    async def _deliver(self, request: web.Request, sent: Reply, mishap: Mishap | None) -> web.StreamResponse:
        data = self.answer(sent, mishap)
        if mishap is not Mishap.DIES:
            return web.Response(body=data, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        rid = json.loads(await request.read())["rid"]
        self.aborted.append(rid)
        if rid in self._running:
            self._running[rid].set()
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if body.get("abort_all_requests"):
            self._takes.clear()  # what comes meanwhile waits for the new weights
            for event in self._running.values():
                event.set()
            while self._running:
                await asyncio.sleep(0.001)
        if "model_path" in body:
            self.loaded.append(body["model_path"])
            await self._loads.wait()
        self.version = body.get("weight_version") or body["new_version"]
        self._takes.set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        return web.json_response({"success": True, "message": "as told"})

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushed += 1
        return web.Response(text="Cache flushed.")

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/models/scripted", "weight_version": self.version})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "served_model_name": "scripted",
                "context_length": None,
                "version": "0.5.23",
                "incremental_streaming_output": self._incremental,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": self._context}]})


class EventStream:
    """The events of one streamed reply, at the interval that its request asks for."""

    def __init__(self, engine: ScriptedEngine, sent: Reply, mishap: Mishap | None, *, incremental: bool) -> None:
        self._engine = engine
        self._sent = sent
        self._mishap = mishap
        self._incremental = incremental
        self._interval: int = sent.asked.body["sampling_params"].get("stream_interval") or 1
        self._given = 0
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})

    async def begin(self, request: web.Request) -> None:
        await self._response.prepare(request)

    async def sampled(self, count: int) -> None:
        """Send what there is, if it is time; the last ids come with the end."""
        dead = self._mishap is Mishap.DIES and count > len(self._sent.ids) // 2
        if not dead and count < len(self._sent.ids) and (self._interval == 1 or count % self._interval == 1):
            await self._event(self._engine.answer(self._sent, self._mishap, self._since(), count))
            self._given = count

    async def end(self, request: web.Request, sent: Reply) -> web.StreamResponse:
        """The rest of what is sent in the end, which is less where it was aborted."""
        if self._mishap is Mishap.DIES:
            assert request.transport is not None
            request.transport.abort()
            return self._response
        await self._event(self._engine.answer(sent, self._mishap, self._since()))
        await self._response.write(b"data: [DONE]\n\n")
        return self._response

    def _since(self) -> int:
        return self._given if self._incremental else 0

    async def _event(self, data: bytes) -> None:
        await self._response.write(b"data: " + data + b"\n\n")


class Splits:
    """Random splits of a text into entries of a byte-level vocabulary; special tokens stay whole."""

    def __init__(self, tokenizer: Tokenizer, chance: random.Random) -> None:
        self._chance = chance
        added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._special = added
        self._vocabulary = {text: number for text, number in tokenizer.get_vocab().items() if text not in added}
        self._longest = 6
        self._letters = _byte_letters()

    def of(self, text: str) -> list[int]:
        ids: list[int] = []
        plain = ""
        at = 0
        while at < len(text):
            special = next((one for one in self._special if text.startswith(one, at)), None)
            if special is None:
                plain += text[at]
                at += 1
                continue
            ids += [*self._plain(plain), self._special[special]]
            plain = ""
            at += len(special)
        return [*ids, *self._plain(plain)]

    def _plain(self, text: str) -> list[int]:
        letters = "".join(self._letters[byte] for byte in text.encode())
        ids = []
        at = 0
        while at < len(letters):
            sizes = [size for size in range(1, self._longest + 1) if letters[at : at + size] in self._vocabulary]
            size = self._chance.choice([one for one in sizes if at + one <= len(letters)])
            ids.append(self._vocabulary[letters[at : at + size]])
            at += size
        return ids


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def odd_json(value: Any, chance: random.Random) -> str:
    """JSON with spacing that no serializer makes, key order kept."""

    def space() -> str:
        return chance.choice(["", " ", "  ", "\n "])

    if isinstance(value, dict):
        items = [f"{space()}{json.dumps(key)}{space()}:{space()}{odd_json(one, chance)}" for key, one in value.items()]
        return "{" + f"{space()},".join(items) + space() + "}"
    if isinstance(value, list):
        return "[" + f"{space()},{space()}".join(odd_json(one, chance) for one in value) + space() + "]"
    return json.dumps(value, ensure_ascii=False)


def tool_call(name: str, arguments: Json, chance: random.Random | None = None) -> str:
    """A tool call as Qwen3 writes it, its JSON oddly spaced."""
    call = odd_json({"name": name, "arguments": arguments}, chance or random.Random(name))
    return f"<tool_call>\n{call}\n</tool_call>"


def _byte_letters() -> list[str]:
    """By which character a byte-level vocabulary spells each byte: itself if it is printable, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
