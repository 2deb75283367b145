"""The gateway's HTTP API as OpenAPI: the routes of its dialects and its admin API, and the bodies that they read."""

import json
import re
from typing import Any

import msgspec

import rolltape
from rolltape.gateway.finished import Ending
from rolltape.gateway.server.admin import DropReason, NewWeights, ResumedWeights, WeightsName
from rolltape.gateway.sessions import SessionSpec
from rolltape.gateway.wire import DIALECTS
from rolltape.gateway.wire.protocol import Answers

_REF = "#/components/schemas/{name}"
_BODIES = (SessionSpec, Ending, WeightsName, ResumedWeights, NewWeights, DropReason)

# Method and path, summary, the body that it reads, and the fields that it answers with.
_SESSION = [
    "session",
    "rollout",
    "try",
    "group",
    "task_id",
    "step",
    "attempt",
    "opened_at",
    "turns",
    "in_flight",
    "ended",
]
_WEIGHTS = ["version", "paused"]
_ADMIN: tuple[tuple[str, str, str, type | None, list[str]], ...] = (
    ("post", "/sessions", "Open a session.", SessionSpec, [*_SESSION, "key", "base_url", "openai_base_url"]),
    ("get", "/sessions", "List open sessions.", None, ["sessions"]),
    ("get", "/sessions/{id}", "Show one session with its turns.", None, _SESSION),
    (
        "post",
        "/sessions/{id}/finish",
        "End a session, set its reward, and return its samples.",
        Ending,
        ["session", "rollout", "try", "group", "rollout_ended", "turns", "interrupted", "samples", "ledger"],
    ),
    ("delete", "/sessions/{id}", "Drop a session. Its rollout fails.", DropReason, ["dropped"]),
    ("post", "/weights", "Announce a weight version.", WeightsName, [*_WEIGHTS, "in_flight"]),
    (
        "post",
        "/weights/pause",
        "Stop generating. Requests wait.",
        WeightsName,
        [*_WEIGHTS, "in_flight", "interrupted"],
    ),
    ("post", "/weights/resume", "Generate again, under this version.", ResumedWeights, [*_WEIGHTS, "in_flight"]),
    (
        "post",
        "/weights/update",
        "Have every engine load a checkpoint folder.",
        NewWeights,
        [*_WEIGHTS, "interrupted"],
    ),
    ("get", "/status", "Show counts, rates and engines.", None, ["run", "model", "sessions", "engines", "counts"]),
    ("get", "/metrics", "Metrics in Prometheus' text format.", None, []),
)
_HEALTH = {
    "/livez": "200 while the process runs.",
    "/readyz": "200 when a request can be served, else 503 with the reason.",
    "/health": "The same as /readyz.",
    "/healthz": "The same as /readyz.",
    "/": "The name of the program.",
}
_AGENT = {
    Answers.TURN: ("post", "Ask the model for a reply, whole or streamed."),
    Answers.COUNT: ("post", "Count the tokens of a prompt."),
    Answers.TOKENS: ("post", "Give the ids of a prompt."),
    Answers.TEXT: ("post", "Give the text of ids."),
    Answers.MODELS: ("get", "List the model."),
    Answers.MODEL: ("get", "Show the model."),
}
_SPEAKS = {
    "chat": "OpenAI Chat Completions",
    "completions": "OpenAI Completions",
    "generate": "vLLM's generate with token ids",
    "responses": "OpenAI Responses",
    "messages": "Anthropic Messages",
    "gemini": "Google Gemini",
}


def openapi_path(route: str) -> str:
    """A path of aiohttp as OpenAPI has it: `{name:pattern}` becomes `{name}`."""
    return re.sub(r"\{(\w+):(?:[^{}]|\{[^{}]*\})*\}", r"{\1}", route)


def openapi() -> dict[str, Any]:
    """The whole document."""
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for dialect in DIALECTS:
        for route in dialect.routes:
            method, summary = _AGENT[route.answers]
            operation = paths.setdefault(openapi_path(route.path), {}).setdefault(method, _agent_operation(summary))
            operation["tags"].append(_SPEAKS[dialect.name])
            operation["parameters"] = _path_parameters(openapi_path(route.path))
    for method, path, summary, body, fields in _ADMIN:
        paths.setdefault(path, {})[method] = _admin_operation(path, summary, body, fields)
    for path, summary in _HEALTH.items():
        paths[path] = {"get": {"tags": ["health"], "summary": summary, "security": [], "responses": _plain(summary)}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rolltape gateway",
            "version": ".".join(rolltape.__version__.split(".")[:2]),
            "description": "Model calls take a session's key. They also exist below /s/{key}, with the key in the "
            "path, and below /with/{identity} on an open gateway. All other routes take the admin key.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "session": {"type": "http", "scheme": "bearer", "description": "A session's key."},
                "admin": {"type": "http", "scheme": "bearer", "description": "The run's admin key."},
            },
        },
    }


def openapi_text() -> str:
    """The document as it is written."""
    return json.dumps(openapi(), indent=2) + "\n"


def _agent_operation(summary: str) -> dict[str, Any]:
    return {
        "tags": [],
        "summary": summary,
        "security": [{"session": []}],
        "responses": {
            "200": {"description": "The API's own form of the answer."},
            "401": {"description": "The key belongs to no session."},
            "429": {"description": "The session has had its turns, or the engine is busy."},
            "503": {"description": "The session is finished, or the gateway is ending."},
        },
    }


def _admin_operation(path: str, summary: str, body: type | None, fields: list[str]) -> dict[str, Any]:
    told = {"type": "object", "properties": {"schema": {"const": 1}}, "required": ["schema", *fields]}
    content = {"application/json": {"schema": told}} if fields else {"text/plain": {}}
    operation: dict[str, Any] = {
        "tags": ["admin"],
        "summary": summary,
        "security": [{"admin": []}],
        "parameters": _path_parameters(path),
        "responses": {
            "200": {"description": summary, "content": content},
            "401": {"description": "The admin key is missing or wrong."},
        },
    }
    if body is not None:
        asked = {"$ref": _REF.format(name=body.__name__)}
        operation["requestBody"] = {"content": {"application/json": {"schema": asked}}}
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def _plain(summary: str) -> dict[str, Any]:
    return {"200": {"description": summary, "content": {"text/plain": {}}}}
