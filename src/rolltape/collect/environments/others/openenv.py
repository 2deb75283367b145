"""The environment `openenv:URL`: a running OpenEnv server, with a session of its own for each attempt."""

import json
from collections.abc import Iterator
from typing import Any

import aiohttp
from openenv.core.generic_client import GenericEnvClient

from rolltape.collect.environments.others.stepped import (
    StepFields,
    SteppedEpisode,
    StepResult,
    UnreadableAction,
    parse_step_fields,
    seed_tasks,
)
from rolltape.collect.environments.protocol import Episode
from rolltape.collect.tasks import Task
from rolltape.errors import CollectError, TaskError
from rolltape.records.jsonable import shown

_REFUSED = "VALIDATION_ERROR"  # the server's code for an invalid action
_OWN_FIELDS = ("metadata",)  # fields of every action in all environments


class OpenEnvEnvironment:
    """A server. Its tasks are seeds, which it gets with `reset`."""

    is_endless = True

    def __init__(self, url: str) -> None:
        self.name = f"openenv:{url}"
        self._url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise TaskError(f"{self.name}: write the address of a server, such as openenv:http://127.0.0.1:8000")

    def tasks(self, split: str | None) -> Iterator[Task]:
        """A task for each seed, from 0."""
        return seed_tasks(self.name, split)

    def check(self, task: Task) -> None:
        parse_step_fields(task)

    def begin(self, task: Task, seed: int) -> Episode:
        fields = parse_step_fields(task)
        return SteppedEpisode(fields, _OpenEnvWorld(self._url, fields), seed)


class _OpenEnvWorld:
    def __init__(self, url: str, fields: StepFields) -> None:
        self._url = url
        self._options = fields.options
        self._client: GenericEnvClient | None = None
        self._schema: dict[str, Any] = {}  # of actions
        self._only_text: str | None = None  # the field of an action that has one text and needs nothing else

    async def open(self, seed: int) -> StepResult:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"{self._url}/schema") as answered:
                answered.raise_for_status()
                self._schema = (await answered.json())["action"]
            self._only_text = _find_only_text(self._schema)
            self._client = GenericEnvClient(base_url=self._url)
            await self._client.connect()
            return _parse_result(await self._client.reset(seed=seed, **self._options))
        except (aiohttp.ClientError, OSError, LookupError, ValueError, RuntimeError) as error:
            raise CollectError(f"openenv:{self._url} could not begin: {type(error).__name__}: {error}") from error

    def rules(self) -> str:
        if not self._schema or self._only_text is not None:
            return ""
        return f"Answer with your action, a JSON object with these fields: {json.dumps(_fields(self._schema))}"

    def describe(self, result: StepResult) -> str:
        texts = [value for value in result.observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == len(result.observation) == 1 else json.dumps(result.observation)

    def parse(self, text: str) -> Any:
        if self._only_text is not None:
            return {self._only_text: text}
        start, end = text.find("{"), text.rfind("}")
        try:
            action = json.loads(text[start : end + 1])
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise UnreadableAction("There is no JSON object in your answer.")
        return action

    async def step(self, action: Any) -> StepResult:
        assert self._client is not None
        try:
            return _parse_result(await self._client.step(action))
        except RuntimeError as error:  # the client's type for an error that the server reports
            if _REFUSED in str(error):
                raise UnreadableAction(f"Your action was refused: {error}") from None
            raise CollectError(f"openenv:{self._url}: {error}") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in schema.get("properties", {}).items() if name not in _OWN_FIELDS}


def _find_only_text(schema: dict[str, Any]) -> str | None:
    fields = _fields(schema)
    texts = [name for name, one in fields.items() if one.get("type") == "string"]
    return texts[0] if len(texts) == len(fields) == 1 else None


def _parse_result(result: Any) -> StepResult:
    if not isinstance(result.observation, dict):
        raise CollectError(f"the server's observation is {shown(result.observation)}; it must be an object")
    return StepResult(observation=result.observation, reward=float(result.reward or 0.0), done=bool(result.done))
