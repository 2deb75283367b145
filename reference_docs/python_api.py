"""The pages of the Python API: signatures and docstrings of what each public module exports."""

import ast
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

_MODULES: dict[str, str] = {
    "rolltape": "Record, read, cut and export. Import these names from `rolltape` itself.",
    "rolltape.collect": "Tasks, agents and environments.",
    "rolltape.doctor": "The conformance kit.",
    "rolltape.export": "Files of samples, turns, rollouts and traces.",
    "rolltape.export.formats": "Samples in the form of a training framework.",
    "rolltape.groups": "Whole groups for a trainer.",
    "rolltape.importers": "Rollouts that other programs wrote.",
    "rolltape.integrations": "Live sources of samples inside a training job.",
    "rolltape.tiny": "The shipped model and its engine.",
    "rolltape.tokens": "Token records of a trainer.",
    "rolltape.tracking": "Trackers.",
    "rolltape.tree": "Trees and forks.",
}
# Modules before a type's own name, and defaults that are functions.
_NOISE = re.compile(r"\b(?:rolltape|collections|typing|numpy|pathlib|os|torch|enum)\.(?:\w+\.)*(?=\w)|['~]")
_FUNCTION = re.compile(r"<\w+ .*? at 0x[0-9a-f]+>|<class [^>]*>")


def api_pages() -> dict[str, str]:
    """The index and a page per module."""
    rows = "\n".join(f"| [`{name}`]({_file(name)}) | {about} |" for name, about in _MODULES.items())
    index = (
        "# Python API\n\n`python -m reference_docs` writes these pages from the docstrings. The names on them are "
        "public; [compatibility](../compatibility.md) says what that means. Everything else may change.\n\n"
        f"| module | content |\n| --- | --- |\n{rows}\n"
    )
    return {"api/index.md": index, **{f"api/{_file(name)}": _module_page(name) for name in _MODULES}}


def _file(module: str) -> str:
    return f"{module}.md"


def _module_page(name: str) -> str:
    module = importlib.import_module(name)
    parts = [f"# {name}\n\n{_docstring(module)}\n"]
    exported = [name for name in sorted(module.__all__, key=str.lower) if name != "__version__"]
    parts += [_entry(name, getattr(module, name)) for name in exported]
    return "\n".join(parts)


def _entry(name: str, value: Any) -> str:
    if isinstance(value, type):
        methods = "".join(_method(name, *member) for member in _public_members(value))
        kind = "" if issubclass(value, enum.Enum) else f"\n```text\n{name}{_signature(value)}\n```\n"
        return f"## {name}\n{kind}\n{_docstring(value)}\n{methods}"
    if callable(value):
        return f"## {name}\n\n```text\n{name}{_signature(value)}\n```\n\n{_docstring(value)}\n"
    return f"## {name}\n\nA constant of type `{type(value).__name__}`.\n"


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that a class of this package defines itself, or inherits from one."""
    for name, member in inspect.getmembers_static(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
        if name.startswith("_") or not owner.__module__.startswith("rolltape"):
            continue
        if isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member):
            yield name, member


def _method(owner: str, name: str, member: Any) -> str:
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    docstring = _docstring(function)
    shown = name if isinstance(member, property) else f"{name}{_signature(function, bound=True)}"
    return f"\n### {owner}.{name}\n\n```text\n{shown}\n```\n\n{docstring}\n" if docstring else ""


def _signature(value: Any, *, bound: bool = False) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(…)"
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    plain = str(signature.replace(parameters=parameters))
    text = _plain(plain)
    if len(text) <= 96:
        return text
    shown = signature.replace(parameters=parameters)
    inner = ",\n    ".join(_plain(str(one)) for one in _with_markers(shown))
    back = text[text.rindex(" -> ") :] if " -> " in text else ""
    return f"(\n    {inner},\n){back}"


def _plain(signature: str) -> str:
    return _FUNCTION.sub("…", _NOISE.sub("", signature))


def _with_markers(signature: inspect.Signature) -> Iterator[object]:
    """The parameters, with `*` before the first that is given by name alone."""
    marked = False
    for one in signature.parameters.values():
        marked = marked or one.kind is one.VAR_POSITIONAL
        if one.kind is one.KEYWORD_ONLY and not marked:
            marked = True
            yield "*"
        yield one


def _docstring(value: Any) -> str:
    """A docstring as Markdown: indented examples become code, the rest stays."""
    text = inspect.getdoc(value) or ""
    parts = []
    for block in re.split(r"\n\n+(?=\S)", text):
        lines = block.split("\n")
        cut = next((at for at, line in enumerate(lines) if line.startswith("    ")), len(lines))
        prose, code = "\n".join(lines[:cut]).rstrip(), textwrap.dedent("\n".join(lines[cut:])).strip("\n")
        if prose.strip() not in ("", "Example:"):
            parts.append(prose)
        if code:
            parts.append(f"```{'py' if _is_python(code) else 'text'}\n{code}\n```")
    return "\n\n".join(parts)


def _is_python(code: str) -> bool:
    try:
        compile(code, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return False
    return True
