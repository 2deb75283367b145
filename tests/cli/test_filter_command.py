"""`rolltape filter`: by a rule, as a list, and taken back; on sealed runs and on runs that others record into."""

import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from commands import Cli, rows
from grouped_runs import filtered, record_group, said
from rolltape.records.rollout import EventKind

RULES = """
def short(rollout):
    text = rollout.turns[-1].reply.text
    return f"its reply has {len(text)} characters" if len(text) < 5 else None

def fails(rollout):
    return {}["verdict"] if rollout.head.attempt == 1 else True

def odd(rollout):
    return 3
"""

RECORDER = """
import sys, rolltape
from taped import first_turn
with rolltape.open(sys.argv[1], name="exp") as tape:
    for attempt in range(3):
        rollout = tape.rollout(task_id="live", attempt=attempt)
        first_turn(rollout.session())
        if attempt < 2:
            rollout.finish(reward=1.0)
    print("ready", flush=True)
    sys.stdin.readline()
    rollout.finish(reward=1.0)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A group without spread, and one with, whose first half is of older weights."""
    path = tmp_path / "exp"
    record_group(path, "easy", [1, 1], versions=["1", "2"], texts=["yes", "of course"])
    record_group(path, "hard", [0, 1], versions=["2", "3"], texts=["no", "well then"])
    return path


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "filter_rules_here.py").write_text(RULES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "filter_rules_here", raising=False)


def test_groups_without_spread_are_filtered_with_their_reason(cli: Cli, run: Path) -> None:
    result = cli("filter", run, "--no-spread")
    assert (result.code, result.err) == (0, "")
    header, line, summary = result.out.splitlines()
    assert header.split() == ["by", "rollouts", "sampled", "reason"]
    assert line.split(maxsplit=3) == ["no-spread", "2", "4", "all 2 rewards of its group are 1"]
    assert summary == "4 rollouts: 2 filtered"
    assert list(filtered(run).values()) == ["all 2 rewards of its group are 1"] * 2
    assert {event.by for event in said(run, EventKind.FILTER)} == {"no-spread"}


def test_a_second_time_nothing_is_said_and_no_journal_made(cli: Cli, run: Path) -> None:
    cli("filter", run, "--no-spread")
    journals = sorted((run / "journals").iterdir())
    again = cli("filter", run, "--no-spread")
    assert again.out.splitlines()[-1] == "4 rollouts: 2 already filtered"
    assert sorted((run / "journals").iterdir()) == journals


def test_a_dry_run_changes_nothing(cli: Cli, run: Path) -> None:
    *lines, summary = rows(cli("filter", run, "--no-spread", "--dry-run", "--json"))
    assert [line["change"] for line in lines] == ["filtered_now"] * 2
    assert summary == {
        "judged": 4,
        "filtered_now": 2,
        "filtered_already": 0,
        "taken_back": 0,
        "unjudged": {},
        "dry_run": True,
    }
    assert cli("filter", run, "--no-spread", "--dry-run").out.endswith("4 rollouts: 2 would be filtered\n")
    assert filtered(run) == {}


def test_stale_counts_versions_behind_the_newest(cli: Cli, run: Path) -> None:
    with rolltape.open(run) as tape:
        for version in ("1", "2", "3", "4"):
            tape.announce_version(version)
    assert cli("filter", run, "--stale", 3).out == "4 rollouts: none filtered\n"
    cli("filter", run, "--stale", 2)
    assert list(filtered(run).values()) == ["sampled by weights 1, more than 2 versions behind the newest"]
    result = cli("filter", run, "--stale", 1)
    assert result.out.splitlines()[-1] == "4 rollouts: 3 filtered"
    back = cli("filter", run, "--stale", 2)
    assert back.out.splitlines()[-1] == "4 rollouts: 1 filtered, 2 undone"
    assert len(filtered(run)) == 1


def test_stale_needs_versions(cli: Cli, tmp_path: Path) -> None:
    record_group(tmp_path / "exp", "a", [1])
    result = cli("filter", tmp_path / "exp", "--stale", 0)
    assert (result.code, result.out) == (2, "")
    assert "--stale: run exp has no weight versions" in result.err


def test_rollouts_that_cannot_be_judged_are_counted_with_why(cli: Cli, run: Path) -> None:
    record_group(run, "unknown", [0, 1])
    result = cli("filter", run, "--stale", 0)
    assert result.out.splitlines()[-1] == "4 rollouts: 3 filtered"
    assert result.err == "rolltape: 2 rollouts not judged: its replies name no weight version\n"
    assert rows(cli("filter", run, "--stale", 0, "--json"))[-1]["unjudged"] == {"its replies name no weight version": 2}


@pytest.mark.usefixtures("rules")
def test_a_function_rejects_by_name(cli: Cli, run: Path) -> None:
    result = cli("filter", run, "--reject", "python:filter_rules_here:short")
    assert result.out.splitlines()[-1] == "4 rollouts: 2 filtered"
    assert sorted(filtered(run).values()) == ["its reply has 2 characters", "its reply has 3 characters"]
    assert {event.by for event in said(run, EventKind.FILTER)} == {"python:filter_rules_here:short"}
    assert cli("filter", run, "--reject", "filter_rules_here:short").out.endswith("2 already filtered\n")


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("fails", "it raised KeyError: 'verdict' (filter_rules_here.py, line 7), for rollout "),
        ("odd", "it gave 3 for rollout "),
        ("absent", "absent of module filter_rules_here is not there"),
    ],
)
def test_a_function_that_cannot_judge_is_one_error_and_filters_nothing(
    cli: Cli, run: Path, function: str, told: str
) -> None:
    result = cli("filter", run, "--reject", f"python:filter_rules_here:{function}")
    assert (result.code, result.out) == (2, "")
    assert told in result.err
    assert result.err.count("\n") == 1
    assert said(run, EventKind.FILTER) == []


def test_a_module_that_cannot_be_imported_is_one_error(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "filter_rules_torn.py").write_text("import math\nlimit = math.sqrt(-1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = cli("filter", run, "--reject", "python:filter_rules_torn:f")
    assert result.code == 2
    assert "its module raised ValueError: math domain error (filter_rules_torn.py, line 2)" in result.err


def test_only_what_is_asked_for_is_judged(cli: Cli, run: Path) -> None:
    later = record_group(run, "easy", [1, 1], step=1)
    assert cli("filter", run, "--no-spread", "--step", 1).out.splitlines()[-1] == "2 rollouts: 2 filtered"
    assert filtered(run).keys() == set(later)
    assert cli("filter", run, "--no-spread", "--task", "hard").out == "2 rollouts: none filtered\n"
    cli("filter", run, "--no-spread")
    assert cli("filter", run, "--undo", "--step", 0).out.splitlines()[-1] == "4 rollouts: 2 undone"
    assert filtered(run).keys() == set(later)


def test_without_a_rule_the_filters_that_stand_are_listed(cli: Cli, run: Path) -> None:
    assert cli("filter", run).out == "4 rollouts: none filtered\n"
    cli("filter", run, "--no-spread")
    cli("filter", run, "--stale", 1)
    *lines, summary = cli("filter", run).out.splitlines()
    assert [line.split(maxsplit=3)[:2] for line in lines[1:]] == [["no-spread", "2"], ["stale", "1"]]
    assert summary == "4 rollouts: 2 filtered"
    *records, _ = rows(cli("filter", run, "--json"))
    assert [record["by"] for record in records] == ["no-spread", "stale", "no-spread"]


def test_filters_are_taken_back_by_rule_or_all(cli: Cli, run: Path) -> None:
    cli("filter", run, "--no-spread")
    cli("filter", run, "--stale", 1)
    result = cli("filter", run, "--undo", "--by", "no-spread")
    assert result.out.splitlines()[-1] == "4 rollouts: 2 undone"
    assert list(filtered(run).values()) == ["sampled by weights 1, more than 1 version behind the newest"]
    assert cli("filter", run, "--undo", "--by", "no-spread").out == "4 rollouts: nothing to undo\n"
    cli("filter", run, "--undo", "--dry-run")
    assert len(filtered(run)) == 1
    cli("filter", run, "--undo")
    assert filtered(run) == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--no-spread", "--stale", "1"], "--no-spread and --stale: give only one of them"),
        (["--undo", "--no-spread"], "--no-spread and --undo: give only one of them"),
        (["--by", "stale"], "--by needs --undo"),
        (["--undo", "--by", "style"], "--by style: no filters of this rule in run exp; rules: no-spread"),
        (["--stale", "-1"], "--stale"),
        (["--reject", "rules"], "rules names no function; write python:module:function"),
        (["--no-spread", "--step", "9"], "--step 9: no rollouts match in run exp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told(cli: Cli, run: Path, arguments: list[str], told: str) -> None:
    cli("filter", run, "--no-spread")
    result = cli("filter", run, *arguments)
    assert (result.code, result.out) == (2, "")
    assert told in result.err


def test_a_filtered_rollout_shows_its_reason_in_trace_and_ledger(cli: Cli, run: Path) -> None:
    cli("filter", run, "--no-spread")
    one = next(iter(filtered(run)))
    reason = "all 2 rewards of its group are 1"
    assert cli("trace", run, one).out.splitlines()[1] == f"filtered: {reason}"
    (trace,) = rows(cli("trace", run, one, "--json"))
    assert (trace["filtered"], len(trace["steps"])) == (reason, 1)
    out = cli("ledger", run).out.splitlines()
    assert ["dropped:filtered", "4", "50.0%"] in [line.split() for line in out]
    assert f"filtered: 2 rollouts, {reason}" in out
    assert {row.get("filtered") for row in rows(cli("ledger", run, "--json"))} == {reason, None}
    assert {sample["rollout"] for sample in rows(cli("samples", run, "--json"))}.isdisjoint(filtered(run))


def test_a_sealed_run_takes_filters(cli: Cli, run: Path) -> None:
    rolltape.seal(run)
    cli("filter", run, "--no-spread")
    rolltape.seal(run)
    assert len(filtered(run)) == 2
    assert cli("filter", run, "--no-spread").out.splitlines()[-1] == "4 rollouts: 2 already filtered"
    cli("filter", run, "--undo")
    assert filtered(run) == {}
    assert cli("check", run).code == 0


def test_a_run_that_another_process_records_takes_filters(cli: Cli, run: Path) -> None:
    command = [sys.executable, "-c", RECORDER, str(run)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        result = cli("filter", run, "--no-spread")
        assert result.out.splitlines()[-1] == "4 rollouts: 2 filtered"
        assert result.err == "rolltape: 2 rollouts not judged: its group has rollouts that still run\n"
        other.communicate("\n", timeout=60)
    assert other.returncode == 0
    assert cli("filter", run, "--no-spread").out.splitlines()[-1] == "7 rollouts: 3 filtered, 2 already filtered"
    assert cli("check", run).code == 0


def test_a_url_lists_filters_and_takes_none(cli: Cli, run: Path) -> None:
    cli("filter", run, "--stale", 1)
    cli("seal", run, "--to", "memory://filtered-runs/exp")
    url = "memory://filtered-runs/exp"
    assert cli("filter", url).out.splitlines()[-1] == "4 rollouts: 1 filtered"
    refused = cli("filter", url, "--no-spread")
    assert (refused.code, refused.out) == (2, "")
    assert "a run is recorded on a local disk, not at a URL" in refused.err
