"""The command `rolltape`: how a command line becomes a call, and an error one line and an exit code."""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from rolltape.cli.exits import EXIT_CODES, Exit, exit_of
from rolltape.cli.grouped import Grouped
from rolltape.cli.output.screen import forget_output, visible
from rolltape.cli.verbs import SETTINGS, STAGES, ByStage
from rolltape.errors import RolltapeError

# Some versions of typer bring their own click; this is the one that is in use.
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    cls=ByStage,
    help="The flight recorder for LLM reinforcement learning.",
    epilog="rolltape COMMAND --help says more, and what exit codes mean; --version.",
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _verbs in STAGES.values():
    for _name, _verb in _verbs.items():
        app.command(_name, cls=Grouped, epilog=EXIT_CODES, context_settings=SETTINGS.get(_name))(_verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rolltape {version('rolltape')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Nothing is done without a verb."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(Exit.USAGE)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Errors are one line on standard error."""
    try:
        _spell_what_cannot_be_encoded()
        code = _done(arguments)
        sys.stdout.flush()
    except RolltapeError as error:
        return _failed(str(error), exit_of(error))
    except _ClickException as error:
        shown = error.format_message() if hasattr(error, "format_message") else str(error)
        return _failed(shown, Exit.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe went away; there is nobody left to tell.
        forget_output()
        return Exit.OK
    except OSError as error:
        if error.filename is not None:
            return _failed(f"{error.filename}: {error.strerror}", Exit.RUN)
        forget_output()
        return _failed(f"the output cannot be written: {error.strerror or error}", Exit.OUTPUT)
    return code


def _done(arguments: Sequence[str]) -> int:
    """Parse and call. Not by the group's own `main`, which exits with 1 on a closed pipe, and is mute on Ctrl-C."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("rolltape", list(arguments)) as context:
            code = command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return code if isinstance(code, int) else Exit.OK


def _spell_what_cannot_be_encoded() -> None:
    """Where the terminal's encoding lacks a character, print its escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _failed(message: str, code: Exit) -> int:
    # Standard error may be as full or as closed as standard output.
    with contextlib.suppress(OSError):
        # A list of problems goes on in lines of its own, which are indented.
        print("rolltape: " + "\n  ".join(map(visible, message.split("\n  "))), file=sys.stderr)
    return code


def main() -> None:
    """The entry point of the command."""
    sys.exit(run(sys.argv[1:]))
