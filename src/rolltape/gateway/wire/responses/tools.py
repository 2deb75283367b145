"""Tools of Responses that OpenAI defines and clients run: `local_shell`, `shell`, `apply_patch`.

The model is offered a function. Its calls are sent as items of the tool's own type, and come back as such items.
"""

from typing import Any

import msgspec

from rolltape.gateway.wire.fields import Fields, function_tool, parse_arguments
from rolltape.records.jsonable import encode_json

_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_MILLISECONDS: dict[str, Any] = {"type": "integer", "description": "Time limit in milliseconds."}


class ClientTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of these tools. The field `holder` of a call's item has the arguments."""

    name: str
    description: str
    properties: dict[str, dict[str, Any]]  # required ones first
    required: int  # the number of required ones
    holder: str
    id_prefix: str
    added: dict[str, Any] = {}  # fields of the holder that the model does not write

    @property
    def required_fields(self) -> list[str]:
        return list(self.properties)[: self.required]

    @property
    def call_type(self) -> str:
        return f"{self.name}_call"

    @property
    def output_type(self) -> str:
        return f"{self.name}_call_output"


_ALL = (
    ClientTool(
        name="local_shell",
        description="Run a command on the local machine.",
        properties={
            "command": _TEXTS | {"description": "The program and its arguments."},
            "working_directory": _TEXT,
            "timeout_ms": _MILLISECONDS,
        },
        required=1,
        holder="action",
        id_prefix="lsh",
        added={"type": "exec", "env": {}},
    ),
    ClientTool(
        name="shell",
        description="Run shell commands.",
        properties={
            "commands": _TEXTS | {"description": "Commands, run one after the other."},
            "timeout_ms": _MILLISECONDS,
            "max_output_length": {"type": "integer", "description": "Characters of output to return at most."},
        },
        required=1,
        holder="action",
        id_prefix="sh",
    ),
    ClientTool(
        name="apply_patch",
        description="Create, update or delete a file.",
        properties={
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _TEXT | {"description": "Path of the file, relative to the workspace."},
            "diff": _TEXT | {"description": "The diff to apply; a file to be deleted needs none."},
        },
        required=2,
        holder="operation",
        id_prefix="apc",
    ),
)
CLIENT_TOOLS = {tool.name: tool for tool in _ALL}
CALLS = {tool.call_type: tool for tool in _ALL}
OUTPUTS = {tool.output_type: tool for tool in _ALL}
ID_PREFIXES = tuple(tool.id_prefix for tool in _ALL)


def is_run_by_client(tool: Fields) -> bool:
    """Whether a tool is one of these. OpenAI itself runs a shell in a container."""
    if tool.text("type") not in CLIENT_TOOLS:
        return False
    environment = tool.maybe_object("environment")
    return environment is None or environment.maybe_text("type") == "local"


def as_function(tool: Fields) -> dict[str, Any]:
    """The function that stands for a tool."""
    known = CLIENT_TOOLS[tool.text("type")]
    skills = (tool.maybe_object("environment") or Fields({}, "")).maybe_objects("skills") or ()
    described = [f"{skill.name()} ({skill.text('path')}): {skill.text('description')}" for skill in skills]
    parameters = {"type": "object", "properties": known.properties, "required": known.required_fields}
    description = "\n".join([known.description, *(["Skills:"] if described else []), *described])
    return function_tool(known.name, description, parameters)


def call_fields(name: str, arguments: str) -> dict[str, Any] | None:
    """The fields of a call's item, or None if the arguments do not fit; the call is then sent as a function call."""
    tool, value = CLIENT_TOOLS[name], parse_arguments(arguments)
    if value is None or not all(_fits(value, field, schema) for field, schema in tool.properties.items()):
        return None
    if any(value.get(field) is None for field in tool.required_fields):
        return None
    return {"type": tool.call_type, tool.holder: tool.added | value}


def _fits(value: dict[str, Any], field: str, schema: dict[str, Any]) -> bool:
    given = value.get(field)
    if given is None:
        return True
    match schema["type"]:
        case "array":
            return isinstance(given, list) and all(isinstance(one, str) for one in given)
        case "integer":
            return isinstance(given, int) and not isinstance(given, bool)
    return isinstance(given, str) and given in schema.get("enum", [given])


def read_call(item: Fields) -> dict[str, Any]:
    """The function that an item calls."""
    tool = CALLS[item.text("type")]
    holder = item.object(tool.holder)
    added = {name: value for name, value in tool.added.items() if holder.get(name) == value}
    arguments = {name: value for name, value in holder.value.items() if name not in added}
    return {"name": tool.name, "arguments": encode_json(arguments, holder.path)[0].decode()}


def read_output(item: Fields) -> str:
    """The text of an output for the model."""
    if isinstance(text := item.get("output"), str):
        output = text
    else:
        output = "\n".join(_shell_output(chunk) for chunk in item.maybe_objects("output") or ())
    status = item.maybe_text("status") if item.text("type") == "apply_patch_call_output" else None
    return "\n".join(part for part in (status, output) if part)


def _shell_output(chunk: Fields) -> str:
    """Standard output, standard error, and the exit status."""
    outcome = chunk.maybe_object("outcome")
    ended = "" if outcome is None else _outcome(outcome)
    parts = (chunk.maybe_text("stdout") or "", chunk.maybe_text("stderr") or "", ended)
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _outcome(outcome: Fields) -> str:
    code = outcome.maybe_whole("exit_code")
    return "timed out" if outcome.text("type") == "timeout" else f"exit code {code}"
