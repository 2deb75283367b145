"""Flags under the names of the release before: they work, and a line on standard error says so."""

from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from commands import Cli, rows
from rolltape.cli.app import app
from rolltape.cli.parameters import RENAMED, with_current_flags

RENAMES = [(name, old, new) for name, flags in RENAMED.items() for old, new in flags.items()]


@pytest.mark.parametrize(("name", "old", "new"), RENAMES)
def test_a_renamed_flag_exists_and_its_old_name_is_free(name: str, old: str, new: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    flags = {flag for one in group.commands[name].params for flag in (*one.opts, *one.secondary_opts)}
    assert new in flags
    assert old not in flags


def test_an_old_flag_does_what_the_new_one_does_and_warns(cli: Cli, run: Path, rollout_id: str) -> None:
    new = cli("samples", run, rollout_id, "--max-sample-tokens", 3, "--reward-share", "split", "--json")
    old = cli("samples", run, rollout_id, "--max-tokens", 3, "--reward=split", "--json")
    assert (new.code, new.err) == (0, "")
    assert rows(old) == rows(new)
    assert old.err.splitlines() == [
        "rolltape: --max-tokens is deprecated; use --max-sample-tokens",
        "rolltape: --reward is deprecated; use --reward-share",
    ]


def test_what_follows_two_dashes_is_no_flag() -> None:
    assert with_current_flags("show", ["run", "--", "--by"]) == (["run", "--", "--by"], [])


def test_a_command_without_renamed_flags_is_left_alone() -> None:
    assert with_current_flags("score", ["run", "--by", "judge"]) == (["run", "--by", "judge"], [])


@pytest.mark.parametrize(
    ("given", "current"),
    [(["--advantage", "centred"], ["--advantage", "centered"]), (["--advantage=centred"], ["--advantage=centered"])],
)
def test_the_old_spelling_of_a_value_works_and_is_said_to_be_old(given: list[str], current: list[str]) -> None:
    assert with_current_flags("samples", ["run", *given]) == (
        ["run", *current],
        ["--advantage centred is deprecated; use centered"],
    )
