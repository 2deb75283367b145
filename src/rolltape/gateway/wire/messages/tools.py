"""Tools of the Messages API that Anthropic defines and clients run: bash, the text editor, memory.

The model is offered a function of the same name, whose calls go out as any others.
"""

import re
from typing import Any

from rolltape.gateway.wire.fields import function_tool

_KIND = re.compile(r"(bash|memory|text_editor)_(\d{8})")
_TEXT: dict[str, Any] = {"type": "string"}
_FILE = {"file_text": _TEXT | {"description": "Content of the file to create."}}
_REPLACED = {"old_str": _TEXT | {"description": "Text to replace; it occurs once."}, "new_str": _TEXT}
_INSERTED = {"insert_line": {"type": "integer", "description": "Line after which to insert; 0 is the beginning."}}
_VIEWED: dict[str, Any] = {
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "First and last line to view; -1 is the end.",
    }
}
_FIRST_OF_NEWER_EDITORS = "20250429"  # it has no `undo_edit`
_FIRST_WITH_INSERT_TEXT = "20250728"  # the editors before it insert `new_str`


def function_of(kind: str, name: str) -> dict[str, Any] | None:
    """The function that stands for a tool of such a type; None: Anthropic runs it, or it needs a screen."""
    found = _KIND.fullmatch(kind)
    if found is None:
        return None
    family, version = found.groups()
    if family == "bash":
        return _function(
            name,
            "Run a command in a bash session, which stays open between calls.",
            {"command": _TEXT, "restart": {"type": "boolean", "description": "Start a new session instead."}},
        )
    if family == "memory":
        moved = {"old_path": _TEXT | {"description": "What to rename."}, "new_path": _TEXT}
        return _function(
            name,
            "View and edit the files in /memories, which last between conversations.",
            _command("view", "create", "str_replace", "insert", "delete", "rename")
            | {"path": _TEXT, **_FILE, **_REPLACED, **_INSERTED, "insert_text": _TEXT, **moved, **_VIEWED},
            "command",
        )
    undo = () if version >= _FIRST_OF_NEWER_EDITORS else ("undo_edit",)
    inserted = {"insert_text": _TEXT} if version >= _FIRST_WITH_INSERT_TEXT else {}
    return _function(
        name,
        "View, create and edit files.",
        _command("view", "create", "str_replace", "insert", *undo)
        | {"path": _TEXT, **_FILE, **_REPLACED, **_INSERTED, **inserted, **_VIEWED},
        "command",
        "path",
    )


def _command(*known: str) -> dict[str, Any]:
    return {"command": _TEXT | {"enum": list(known)}}


def _function(name: str, description: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return function_tool(name, description, {"type": "object", "properties": properties, "required": list(required)})
