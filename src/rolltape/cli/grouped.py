"""The help of a command with many options: in the groups that they name."""

from typing import Any

from typer.core import TyperCommand


class Grouped(TyperCommand):
    """Lists options by their `rich_help_panel`, the groups in the order in which they first appear."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            group = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            if line is not None:
                groups.setdefault(group, []).append(line)
        for group, lines in groups.items():
            with formatter.section(group):
                formatter.write_dl(lines)
