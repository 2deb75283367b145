"""A judge: a model behind an OpenAI-compatible endpoint, or a Python function, asked until its answer can be read."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from rolltape.collect.environments.prompts import user
from rolltape.collect.environments.protocol import Message
from rolltape.collect.functions import function_named
from rolltape.collect.threads import called
from rolltape.errors import EngineError, EngineFault, TaskError
from rolltape.gateway.engines.http import Connections, decoded
from rolltape.records.jsonable import shown
from rolltape.records.messages import content_text

T = TypeVar("T")

URL_VARIABLE = "ROLLTAPE_JUDGE_URL"
MODEL_VARIABLE = "ROLLTAPE_JUDGE_MODEL"
KEY_VARIABLE = "ROLLTAPE_JUDGE_KEY"

_SAMPLING = {"temperature": 0.0, "max_tokens": 1024}
_PAUSE_S = 0.5  # before an endpoint is asked again; doubled each time


class Judge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who judges. What a task does not say is the command's, or the process's environment has it, or is as here.

    Of the key there is only the name of its variable, since tasks are recorded.
    """

    base_url: str | None = None  # as OpenAI's clients take it: http://127.0.0.1:8000/v1
    model: str | None = None
    key_env: str | None = None  # the name of a variable; None: KEY_VARIABLE
    function: str | None = None  # "python:module:function" instead: messages in, text out
    sampling: dict[str, Any] | None = None  # put into the request as it is; None: see _SAMPLING
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0  # of one answer
    tries: Annotated[int, msgspec.Meta(ge=1)] = 3

    @property
    def name(self) -> str:
        return self.function or self.model or ""


class Unreadable(msgspec.Struct, frozen=True):
    """Why an answer cannot be read, in words that the judge can use."""

    why: str


class Verdict(msgspec.Struct, Generic[T], frozen=True):
    """What came of asking a judge."""

    value: T | None  # None: it never said anything that could be read
    judge: str
    answers: tuple[str, ...]  # all of them, as they came
    trouble: tuple[str, ...]  # of each try that did not do

    @property
    def ungraded(self) -> str | None:
        """Why there is no value."""
        if self.value is not None:
            return None
        return f"the judge was asked {len(self.trouble)} times; at last: {self.trouble[-1]}"

    def to_data(self) -> dict[str, Any]:
        """For the record."""
        data = {"name": self.judge, "answers": list(self.answers), "trouble": list(self.trouble)}
        return {name: value for name, value in data.items() if value}


Ask = Callable[[Sequence[Message]], Awaitable[str]]


class _Choice(msgspec.Struct):
    message: dict[str, Any]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_COMPLETION = msgspec.json.Decoder(_Completion)


def judge_of(given: Judge | str | None, otherwise: Judge | None = None) -> Judge:
    """The judge that a task names, with `otherwise` for what it leaves open; TaskError if it cannot be asked."""
    judge = Judge(function=given) if isinstance(given, str) else given or Judge()
    if judge.function is not None:
        function_named(judge.function)
        return judge
    otherwise = otherwise or Judge()
    url = judge.base_url or otherwise.base_url or os.environ.get(URL_VARIABLE)
    model = judge.model or otherwise.model or os.environ.get(MODEL_VARIABLE)
    if not url:
        raise TaskError(f"its judge has no base_url; add it to the task, give --judge-url, or set {URL_VARIABLE}")
    if not url.startswith(("http://", "https://")):
        raise TaskError(f"its judge's base_url {url!r} is no address; give one like http://127.0.0.1:8000/v1")
    if not model:
        raise TaskError(f"its judge has no model; add it to the task, give --judge-model, or set {MODEL_VARIABLE}")
    key_env = judge.key_env or otherwise.key_env or KEY_VARIABLE
    return msgspec.structs.replace(judge, base_url=url, model=model, key_env=key_env)


@asynccontextmanager
async def asking(judge: Judge) -> AsyncIterator[Ask]:
    """A way to ask it, while the block lasts."""
    if judge.function is not None:
        function = function_named(judge.function)
        yield lambda messages: called(function, list(messages))
        return
    key = os.environ.get(judge.key_env or KEY_VARIABLE)
    connections = Connections(
        str(judge.base_url), f"judge {judge.base_url}", headers={"Authorization": f"Bearer {key}"} if key else None
    )
    try:
        yield lambda messages: _completion(connections, judge, messages)
    finally:
        await connections.close()


async def verdict_of(
    judge: Judge, ask: Ask, messages: Sequence[Message], read: Callable[[str], T | Unreadable]
) -> Verdict[T]:
    """Ask until `read` can read the answer, as often as the judge's `tries`."""
    answers: list[str] = []
    trouble: list[str] = []
    conversation = list(messages)
    for number in range(judge.tries):
        try:
            answer = await ask(conversation)
        except EngineError as error:
            trouble.append(str(error))
            if number + 1 < judge.tries:
                await asyncio.sleep(_PAUSE_S * 2**number)
            continue
        answers.append(answer)
        value = read(answer)
        if not isinstance(value, Unreadable):
            return Verdict(value, judge.name, tuple(answers), tuple(trouble))
        trouble.append(value.why)
        said: Message = {"role": "assistant", "content": answer}
        conversation = [*messages, said, user(f"That cannot be used: {value.why}. Answer again, as asked.")]
    return Verdict(None, judge.name, tuple(answers), tuple(trouble))


def last_object(text: str) -> dict[str, Any] | Unreadable:
    """The last JSON object in a text that may have other text around it."""
    decoder, found, place = json.JSONDecoder(), None, text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found if isinstance(found, dict) else Unreadable(f"there is no JSON object in {shown(text)}")


async def _completion(connections: Connections, judge: Judge, messages: Sequence[Message]) -> str:
    body = {"model": judge.model, "messages": messages, **(_SAMPLING if judge.sampling is None else judge.sampling)}
    try:
        async with asyncio.timeout(judge.timeout_s):
            data = await connections.post("/chat/completions", msgspec.json.encode(body))
    except TimeoutError:
        raise EngineFault(f"judge {judge.base_url}: no answer in {judge.timeout_s:g} s") from None
    completion = decoded(data, _COMPLETION, f"judge {judge.base_url}")
    if not completion.choices:
        raise EngineFault(f"judge {judge.base_url}: its answer has no choices")
    return content_text(completion.choices[0].message.get("content"))
