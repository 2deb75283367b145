"""The `rolltape` command: its commands by stage, its help, and how an error becomes one line and an exit code."""

import contextlib
import gc
import io
import os
import re
import signal
import sys
import threading
from collections import UserDict
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from rolltape.cli.examples import EXAMPLES
from rolltape.cli.exits import Exit, exit_code, exit_codes_of
from rolltape.cli.parameters import with_current_flags, with_options
from rolltape.cli.screen import discard_output, note, visible
from rolltape.errors import RolltapeError

# The commands of each stage, with the first line of their help. `rolltape.cli.STAGE.COMMAND` defines a function of the
# command's name (`import_` for `import`, a keyword). It is imported on use, so listing commands imports none.
STAGES: dict[str, dict[str, str]] = {
    "record": {
        "demo": "Train the shipped model and show the recorded run.",
        "collect": "Run an agent on tasks and record the rollouts.",
        "serve": "Run the gateway: serve agents and record every turn.",
        "status": "Show gateway status.",
        "import": "Turn another program's rollouts into a run.",
        "doctor": "Check that an engine, a model, and an agent fit together.",
        "engine": "Serve a small Qwen3 model over HTTP with SGLang's API.",
    },
    "look": {
        "view": "Show runs in a web page, live or finished.",
        "ls": "List rollouts.",
        "compare": "Compare two runs, or two parts of one, task by task.",
        "show": "Show a rollout: tree, transcript, and tokens in color.",
        "tree": "Draw a rollout's turns, with the cause of each fork.",
        "trace": "Print a rollout's prompts, replies, and rewards by step.",
        "query": "Run SQL over rollouts, turns, messages, and samples.",
        "push": "Send a run's metrics and traces to a tracker.",
    },
    "judge": {
        "score": "Set rewards of rollouts or turns, even after they finished.",
        "filter": "Exclude rollouts from training by a rule, or undo that.",
        "tag": "Tag rollouts, turns, or tokens, or list the tags of a run.",
        "note": "Write a note on a rollout, turn, or token, or list notes.",
    },
    "train": {
        "samples": "List training samples, or compare two cut policies.",
        "ledger": "Account for every sampled token: trained, or why not.",
        "export": "Write samples, turns, traces, or conversations to a file.",
        "tokens": "List, summarize, show, and check a trainer's token records.",
    },
    "keep": {
        "check": "Verify a run: files, records, samples, and token records.",
        "seal": "Move finished rollouts from journals into Parquet shards.",
        "prune": "Delete turns by step, or a side array.",
    },
}

# `score RUN ROLLOUT -1`: a negative reward must not be taken for an option.
_SETTINGS: dict[str, dict[str, Any]] = {"score": {"ignore_unknown_options": True}}

# Some versions of typer vendor their own click; this is the one in use.
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])

_INTERRUPT_AGAIN_S = 0.05
# Words that the parser adds to errors, without information.
_PARSER_WORDS = re.compile(r"Value error, |, unable to parse string as an? \w+")


class _Commands(UserDict[str, Any]):
    """The commands by name. Each is imported on first use, so that a command does not wait for the others' imports."""

    def __getitem__(self, name: str) -> Any:
        command = super().__getitem__(name)
        return command if isinstance(command, TyperCommand) else self._load(name, stage=command)

    def _load(self, name: str, stage: str) -> Any:
        own = f"{name}_" if iskeyword(name) else name
        function = with_options(getattr(import_module(f"rolltape.cli.{stage}.{own}"), own))
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = _SETTINGS.get(name)
        single.command(name, cls=_SectionedCommand, epilog=exit_codes_of(name), context_settings=settings)(function)
        self[name] = typer.main.get_command(single)
        return self[name]


class _StagedGroup(TyperGroup):
    """Lists the commands by stage, on one screen."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands({name: stage for stage, names in STAGES.items() for name in names})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, STAGES)) + 2
        lines = [
            (f"{stage if place == 0 else '':{width}}{name}", summary)
            for stage, commands in STAGES.items()
            for place, (name, summary) in enumerate(commands.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


class _SectionedCommand(TyperCommand):
    """Lists options by their `rich_help_panel`, then examples, and accepts flags under their old names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        current, warnings = with_current_flags(self.name, args)
        for warning in warnings:
            note(warning)
        return super().parse_args(ctx, current)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(f"{one.metavar}" if one.required else f"[{one.metavar}]" for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                sections.setdefault("Arguments", []).append((parameter.metavar, parameter.help))
            elif (record := parameter.get_help_record(ctx)) is not None:  # None if hidden
                section = getattr(parameter, "rich_help_panel", None) or "Options"
                sections.setdefault(section, []).append(record)
        for section, lines in sections.items():
            with formatter.section(section):
                formatter.write_dl(lines)
        with formatter.section("Examples"):
            for line in EXAMPLES[str(self.name)]:
                formatter.write(f"{' ' * formatter.current_indent}{line}\n")


app = typer.Typer(
    cls=_StagedGroup,
    help="The flight recorder for LLM reinforcement learning.",
    epilog="Use rolltape COMMAND --help for options and exit codes, or --version.",
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rolltape import __version__

        typer.echo(f"rolltape {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show the help if no command is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(Exit.USAGE)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. An error is one line on standard error."""
    try:
        _prepare_streams()
        code = _invoke(arguments)
        sys.stdout.flush()
    except RolltapeError as error:
        return _fail(str(error), exit_code(error))
    except _ClickException as error:
        return _fail(_describe_usage_error(error, arguments), Exit.USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of the pipe is gone, as after `| head -1`.
        discard_output()
        return Exit.OK
    except OSError as error:
        if error.filename is not None:
            return _fail(f"{error.filename}: {error.strerror}", Exit.RUN)
        discard_output()
        return _fail(f"the output cannot be written: {error.strerror or error}", Exit.OUTPUT)
    return code


def _interrupt_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Send Ctrl-C once more, since Python drops it while an object is finalized."""
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    # Later, since it would otherwise be raised in here, and dropped again.
    sending = threading.Timer(_INTERRUPT_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    sending.daemon = True
    sending.start()


def main() -> None:
    """The entry point of the program."""
    sys.unraisablehook = _interrupt_again
    gc.set_threshold(50_000, 20, 20)  # many records, few cycles: garbage collection would take a tenth of the time
    sys.exit(run(sys.argv[1:]))


def _invoke(arguments: Sequence[str]) -> int:
    """Parse and call. The group's own `main` exits with 1 on a closed pipe and prints nothing on Ctrl-C."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("rolltape", list(arguments)) as context:
            code = command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return code if isinstance(code, int) else Exit.OK


def _describe_usage_error(error: Exception, arguments: Sequence[str]) -> str:
    """The parser's message, with the refused value, which it does not always name, and where the help is."""
    shown = _PARSER_WORDS.sub("", error.format_message() if hasattr(error, "format_message") else str(error))
    flags = getattr(getattr(error, "param", None), "opts", ())
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, attached = word.partition("=")
        if flag in flags:
            shown = shown.replace("Input should", f"{(attached if equals else following)!r} should")
            break
    if shown.startswith("Invalid value") or shown.endswith("?"):  # it says what is valid, or what may be meant
        return shown
    known = any(arguments[:1] == [name] for names in STAGES.values() for name in names)
    return f"{shown.removesuffix('.')}; see `rolltape {f'{arguments[0]} ' if known else ''}--help`"


def _prepare_streams() -> None:
    """Discard what is printed to a closed output (`>&-`); escape characters that an output's encoding lacks."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - they are open until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(message: str, code: Exit) -> int:
    # Standard error may be full or closed, too.
    with contextlib.suppress(OSError):
        # The problems in a list follow on indented lines of their own.
        print("rolltape: " + "\n  ".join(map(visible, message.split("\n  "))), file=sys.stderr)
    return code
