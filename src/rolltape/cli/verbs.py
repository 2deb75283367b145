"""The verbs, in the order of the work, and how the help lists them: with their stages, on one screen."""

from collections.abc import Callable
from typing import Any

from typer.core import TyperGroup

from rolltape.cli.judge.filter import filter_rollouts
from rolltape.cli.judge.score import score
from rolltape.cli.keep.check import check
from rolltape.cli.keep.prune import prune
from rolltape.cli.keep.seal import seal
from rolltape.cli.look.ls import ls
from rolltape.cli.look.push import push
from rolltape.cli.look.query import query
from rolltape.cli.look.show import show
from rolltape.cli.look.trace import trace
from rolltape.cli.look.tree import tree
from rolltape.cli.look.view import view
from rolltape.cli.record.collect import collect
from rolltape.cli.record.engine import engine
from rolltape.cli.record.serve import serve
from rolltape.cli.record.status import status
from rolltape.cli.train.export import export
from rolltape.cli.train.ledger import ledger
from rolltape.cli.train.samples import samples
from rolltape.cli.train.tokens import tokens

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
