"""The page of settings: every field of the settings classes with its type, its default and the comment beside it."""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from rolltape.collect.sandboxes.container_settings import ContainerSettings
from rolltape.collect.settings import CollectSettings
from rolltape.gateway.settings import GatewaySettings, Patience
from rolltape.records.policy import Credit, CutPolicy

_CLASSES: tuple[tuple[type, str], ...] = (
    (GatewaySettings, "`rolltape.Gateway(…)` takes these as keyword arguments. `rolltape serve` has a flag for most."),
    (Patience, "The field `patience` of the gateway's settings."),
    (CollectSettings, "`rolltape.Collector` takes this object. `rolltape collect` has a flag for each."),
    (ContainerSettings, "The field `containers` of the collector's settings."),
    (CutPolicy, "`rolltape.cut_policy(name, **changes)` makes one from a preset."),
    (Credit, "`rolltape.Credit(…)`, beside a cut policy."),
)
_HEAD = """\
# Settings

`python -m reference_docs` writes this page from the source. `_s` in a name means seconds, `_mib` means mebibytes.

Environment variables that the program reads:

| variable | meaning |
| --- | --- |
| `ROLLTAPE_ADMIN_KEY` | the gateway's admin key, instead of `--admin-key` |
| `ROLLTAPE_ENGINE_KEY` | the engines' own API key, instead of `--engine-key` |
| `ROLLTAPE_JUDGE_URL`, `ROLLTAPE_JUDGE_MODEL`, `ROLLTAPE_JUDGE_KEY` | the judge, if nothing else names it |
| `ROLLTAPE_VIEW_KEY` | the key of `rolltape view`, instead of `--key` |
| `ROLLTAPE_VIEW_URL` | the address of `rolltape view`, which trackers link to |
| `XDG_CACHE_HOME` | where the index of a run lies that cannot be written to |
| `NO_COLOR` | no colors on a terminal |
"""


class Field(NamedTuple):
    name: str
    type: str
    default: str
    about: str


def fields_of(cls: type) -> Iterator[Field]:
    """The annotated fields of a class, with the comments on their lines or above them."""
    source = inspect.getsource(cls)
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    ]
    comments = {token.start[0]: token.string.lstrip("# ").strip() for token in tokens}
    above = {token.start[0] + 1 for token in tokens if token.line.lstrip().startswith("#")}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            default = "" if node.value is None else ast.unparse(node.value)
            about = comments.get(node.end_lineno or 0, "")
            if not about and node.lineno in above:
                about = comments[node.lineno - 1]
            yield Field(node.target.id, ast.unparse(node.annotation), default, about)


def settings_page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for cls, where in _CLASSES:
        rows = "\n".join(
            f"| `{field.name}` | {_cell(field.type)} | {_cell(field.default)} | {_escaped(field.about)} |"
            for field in fields_of(cls)
        )
        summary = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
        parts.append(
            f"\n## {cls.__name__}\n\n{summary} {where}\n\n| field | type | default | meaning |\n"
            f"| --- | --- | --- | --- |\n{rows}\n"
        )
    return "".join(parts)


def _cell(code: str) -> str:
    return f"`{_escaped(code)}`" if code else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
