"""The command `rolltape`: its verbs, and how an error becomes one line and an exit code."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from rolltape.cli import check, export, ledger, ls, prune, query, samples, seal, show, tree
from rolltape.cli.exits import EXIT_CODES, Exit, exit_of
from rolltape.errors import RolltapeError

# Some versions of typer bring their own click; this is the one that is in use.
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])


class _InOrder(TyperGroup):
    """Lists the verbs in the order of the work, not of the alphabet."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


app = typer.Typer(
    cls=_InOrder,
    help="The flight recorder for LLM reinforcement learning. RUN is a directory or URL.",
    epilog=EXIT_CODES,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    ls.ls,
    tree.tree,
    samples.samples,
    ledger.ledger,
    show.show,
    export.export,
    query.query,
    check.check,
    seal.seal,
    prune.prune,
):
    app.command(epilog=EXIT_CODES)(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rolltape {version('rolltape')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Nothing is done without a verb."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Errors are one line on standard error."""
    try:
        code = app(list(arguments), prog_name="rolltape", standalone_mode=False)
        sys.stdout.flush()
    except RolltapeError as error:
        return _failed(str(error), exit_of(error))
    except _ClickException as error:
        shown = error.format_message() if hasattr(error, "format_message") else str(error)
        # Asking for nothing shows the help, which is printed already.
        return _failed(shown, Exit.USAGE) if shown else Exit.USAGE
    except typer.Abort:
        return _failed("interrupted", Exit.INTERRUPTED)
    except KeyboardInterrupt:
        return _failed("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe went away; there is nobody left to tell, and flushing at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    return code if isinstance(code, int) else Exit.OK


def _failed(message: str, code: Exit) -> int:
    from rolltape.cli.screen import visible

    print(f"rolltape: {visible(message)}", file=sys.stderr)
    return code


def main() -> None:
    """The entry point of the command."""
    sys.exit(run(sys.argv[1:]))
