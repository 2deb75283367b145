"""On a terminal, in a narrow one, and in a pipe."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

import rolltape
from commands import STYLE, Cli, on_terminal
from rolltape.cli.app import STAGES, app
from rolltape.cli.examples import EXAMPLES


def test_help_fits_one_screen(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = cli("--help")
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) <= 33
    assert max(map(len, lines)) <= 80
    assert "Use rolltape COMMAND --help for options and exit codes" in result.out
    commands = result.out.split("Commands:")[1]
    assert "..." not in commands
    assert [line.split()[0] for line in commands.splitlines() if re.match(r"  \w", line)][:-1] == list(STAGES)


COMMANDS = [name for commands in STAGES.values() for name in commands]
SUMMARIES = {name: summary for commands in STAGES.values() for name, summary in commands.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_exit_codes_and_help_for_every_flag(name: str, cli: Cli) -> None:
    result = cli(name, "--help")
    assert result.code == 0
    assert "Exit codes:" in result.out
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    summary = (command.help or "").splitlines()[0]
    assert re.fullmatch(r"[A-Z][a-z]+,? .*\.", summary), "a sentence in one line"
    assert summary == SUMMARIES[name], "as in the list of commands"
    assert len(summary) <= 61, "fits the list of commands"
    without = [one.name for one in command.params if not (getattr(one, "help", None) or "").endswith((".", ")."))]
    assert without == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_plain_english(name: str, cli: Cli) -> None:
    shown = cli(name, "--help").out
    for word in ("Likewise", "fares", "That an ", "Of tasks that", "colour", "honour", "may be repeated"):
        assert word not in shown


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines])
def test_an_example_in_the_help_is_a_valid_command_line(name: str, line: str, cli: Cli) -> None:
    assert f"\n  {line}\n" in cli(name, "--help").out
    assert len(line) <= 78
    program, command, *arguments = shlex.split(line.partition(" | ")[0])
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    assert (program, command) == ("rolltape", name)
    group.commands[name].make_context(name, arguments).close()


READING = ("ls", "compare", "show", "tree", "trace", "query", "samples", "ledger", "export", "check", "seal")
CHANGING = ("score", "filter", "tag", "note", "prune")


def test_examples_work_on_a_recorded_run(
    run: Path, rollout_id: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    shutil.copytree(run, "runs/exp1")
    shutil.copytree(run, "runs/exp2")
    Path("rewards.jsonl").write_text(f'{{"rollout": "{rollout_id}", "reward": 0.5}}\n')
    for name in (*READING, *CHANGING):
        for line in EXAMPLES[name]:
            if "s3://" not in line:
                arguments = shlex.split(line.partition(" | ")[0])[1:]
                known = {"4f2a91": rollout_id[:6], "3": "1"}  # the ids and steps of this run
                result = cli(*(known.get(one, one) for one in arguments))
                assert (result.code, "Traceback" in result.err) == (0, False), f"{line}: {result.err}"


def test_the_scripted_demo_names_a_command_that_works(cli: Cli, tmp_path: Path) -> None:
    told = cli("demo", "--scripted", tmp_path / "scripted").err
    _, _, hint = told.strip().partition("; rolltape ")
    assert cli(*hint.removesuffix(" lists it").split()).code == 0


def test_version_is_printed(cli: Cli) -> None:
    assert cli("--version").out.startswith("rolltape 0.")


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize("verb", ["ls", "samples", "ledger", "tree"])
def test_lines_fit_a_narrow_terminal(run: Path, rollout_id: str, verb: str, columns: int) -> None:
    arguments = [verb, run] if verb == "ls" else [verb, run, rollout_id]
    lines = STYLE.sub("", on_terminal(*arguments, columns=columns, errors=False)).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= columns
    assert any(rollout_id[:8] in line for line in lines) or verb == "ledger"


def test_a_narrow_terminal_is_told_what_is_missing(run: Path) -> None:
    printed = STYLE.sub("", on_terminal("ls", run, columns=40)).splitlines()
    assert printed[0].split() == ["rollout", "step", "task", "status", "reward"]
    missing = "rolltape: columns left out to fit: try, attempt, turns, sampled; use a wider terminal, a pipe, or --json"
    assert missing in printed


def test_the_verdict_of_a_check_is_whole_on_a_narrow_terminal(run: Path) -> None:
    printed = STYLE.sub("", on_terminal("check", run, columns=40, errors=False))
    assert printed.splitlines()[-3:] == [
        "2 rollouts, 3 turns, 5 sampled tokens",
        "checked under exact, keep-head, slime:",
        "no breaches",
    ]


def test_an_error_in_a_trace_is_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    why = "the engine closed the connection after 12 of 40 tokens, and no other engine is up"
    with rolltape.open(tmp_path / "exp") as tape, tape.rollout(task_id="t") as rollout:
        rollout.session().record_turn(
            prompt_messages=[{"role": "user", "content": "fix " * 20}],
            prompt_ids=[1],
            sampled_ids=[],
            finish="error",
            error=why,
        )
        rollout.fail(why)
    printed = STYLE.sub("", on_terminal("trace", tmp_path / "exp", columns=40, errors=False)).splitlines()
    (preview,) = (line for line in printed if line.startswith("  user:"))
    assert (len(preview), preview[-1]) == (40, "…")
    assert why in " ".join(" ".join(line.split()) for line in printed)


def test_what_comes_after_a_collection_is_whole_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"id": "a-task-with-a-long-name", "prompt": "What is 2 + 2?", "answer": 5}\n')
    printed = STYLE.sub("", on_terminal("collect", "tasks.jsonl", "--group-size", 1, columns=70, errors=False))
    lines = printed[printed.index("rolltape ls") :].splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("rolltape")][1].startswith("rolltape trace")
    assert max(map(len, lines)) <= 70
    assert "showsthelowestreward(a-task-with-a-long-name:0)" in "".join(printed.split())


def test_a_query_keeps_ids_whole_on_a_terminal(run: Path, rollout_id: str) -> None:
    sql = "SELECT rollout, repeat('long ', 40) AS text FROM rollouts ORDER BY attempt"
    header, first, _ = STYLE.sub("", on_terminal("query", run, sql, columns=60)).splitlines()
    assert header.split() == ["rollout", "text"]
    assert first.startswith(f"{rollout_id}  long")
    assert first.endswith("…")
    assert len(first) <= 60


def test_a_pipe_gets_whole_lines_without_color(
    cli: Cli, run: Path, rollout_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for verb in ("ls", "samples", "ledger", "tree"):
        out = cli(verb, run, *([] if verb == "ls" else [rollout_id])).out
        assert "\x1b" not in out
        assert "…" not in out
        assert all(line == line.rstrip() for line in out.splitlines())


def test_a_terminal_gets_a_progress_bar_that_goes_away(run: Path) -> None:
    printed = on_terminal("samples", run, columns=60)
    assert "\x1b[2K" in printed  # the bar is wiped
    assert "3 samples of 2 rollouts" in printed.replace("\r\n", " ").replace("\n", " ")


def test_parquet_is_not_thrown_at_a_terminal(run: Path) -> None:
    assert "rolltape: -o: Parquet cannot be written to a terminal" in on_terminal(
        "export", run, "--format", "parquet", columns=80
    )
