"""The verbs, in the order of the work, and how the help lists them: with their stages, on one screen."""

from collections.abc import Callable
from typing import Any

from typer.core import TyperGroup

from rolltape.cli.check import check
from rolltape.cli.collect import collect
from rolltape.cli.engine import engine
from rolltape.cli.export import export
from rolltape.cli.filter import filter_rollouts
from rolltape.cli.ledger import ledger
from rolltape.cli.ls import ls
from rolltape.cli.prune import prune
from rolltape.cli.push import push
from rolltape.cli.query import query
from rolltape.cli.samples import samples
from rolltape.cli.score import score
from rolltape.cli.seal import seal
from rolltape.cli.serve import serve
from rolltape.cli.show import show
from rolltape.cli.status import status
from rolltape.cli.tokens import tokens
from rolltape.cli.trace import trace
from rolltape.cli.tree import tree
from rolltape.cli.view import view

Verb = Callable[..., int]

STAGES: dict[str, dict[str, Verb]] = {
    "record": {"collect": collect, "serve": serve, "status": status, "engine": engine},
    "look": {"view": view, "ls": ls, "show": show, "tree": tree, "trace": trace, "query": query, "push": push},
    "judge": {"score": score, "filter": filter_rollouts},
    "train": {"samples": samples, "ledger": ledger, "export": export, "tokens": tokens},
    "keep": {"check": check, "seal": seal, "prune": prune},
}

# A reward below 0 is no option.
SETTINGS: dict[str, dict[str, Any]] = {"score": {"ignore_unknown_options": True}}


class ByStage(TyperGroup):
    """Lists all verbs, those of a stage together, and no option: there is one, which the last line names."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, STAGES)) + 2
        lines = [
            (f"{stage if place == 0 else '':{width}}{name}", self.commands[name].get_short_help_str(limit=80))
            for stage, verbs in STAGES.items()
            for place, name in enumerate(verbs)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(lines)
