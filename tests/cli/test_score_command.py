"""`rolltape score`: rewards that come late or again, one on the command line or many in a file."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from commands import Cli, rows
from grouped_runs import index, record_group, said
from rolltape.records.rollout import EventKind

RECORDER = """
import sys, rolltape
from taped import first_turn
with rolltape.open(sys.argv[1], name="exp") as tape:
    rollout = tape.rollout(task_id="live")
    first_turn(rollout.session())
    print(rollout.id, flush=True)
    sys.stdin.readline()
    rollout.finish()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "exp"
    record_group(path, "a", [1, 0, 0])
    return path


@pytest.fixture
def ids(run: Path) -> list[str]:
    return list(index(run))


def rewards_file(folder: Path, *values: object) -> Path:
    path = folder / "rewards.jsonl"
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return path


def test_a_reward_is_given_to_a_rollout(cli: Cli, run: Path, ids: list[str]) -> None:
    result = cli("score", run, ids[0][:8], "0.5", "--by", "judge", "--term", "right=1", "--term", "style=-0.5")
    assert (result.code, result.err) == (0, "")
    header, line, summary = result.out.splitlines()
    assert header.split() == ["rollout", "try", "step", "task", "attempt", "turn", "before", "reward", "by"]
    assert line.split() == [ids[0][:8], "0", "0", "a", "0", "1", "0.5", "judge"]
    assert summary == "1 reward: 1 recorded, 1 changed"
    outcome = index(run)[ids[0]].outcome
    assert (outcome.reward, outcome.rewarded_by) == (0.5, "judge")
    assert outcome.reward_terms == {"right": 1.0, "style": -0.5}


def test_the_advantages_of_the_group_follow(cli: Cli, run: Path, ids: list[str]) -> None:
    cli("score", run, ids[1], "2")
    advantages = {sample["rollout"]: sample["advantage"] for sample in rows(cli("samples", run, "--json"))}
    assert advantages == {ids[0]: 0.0, ids[1]: 1.0, ids[2]: -1.0}


def test_the_same_reward_again_changes_nothing(cli: Cli, run: Path, ids: list[str]) -> None:
    cli("score", run, ids[0], "0.5")
    journals = sorted((run / "journals").iterdir())
    assert cli("score", run, ids[0], "0.5").out == "1 reward: nothing new\n"
    assert sorted((run / "journals").iterdir()) == journals
    assert [event.data["reward"] for event in said(run, EventKind.SCORE)] == [1, 0, 0, 0.5]


@pytest.mark.parametrize(("text", "spelled"), [("-1.5", -1.5), ("-1e-3", -0.001), ("-inf", {"$float": "-inf"})])
def test_a_reward_below_0_is_no_option(cli: Cli, run: Path, ids: list[str], text: str, spelled: object) -> None:
    assert cli("score", run, ids[0], text).code == 0
    assert rows(cli("ls", run, "--json"))[0]["reward"] == spelled


def test_a_reward_that_is_not_finite_is_kept_and_remarked(cli: Cli, run: Path, ids: list[str]) -> None:
    result = cli("score", run, ids[0], "nan")
    assert result.err == "rolltape: 1 reward not finite; a group's mean leaves them out\n"
    assert {sample["advantage"] for sample in rows(cli("samples", run, "--json"))} == {None, 0.0}


def test_a_turn_is_rewarded_by_its_place(cli: Cli, run: Path, ids: list[str]) -> None:
    line = cli("score", run, ids[0], "3", "--turn", "0.0").out.splitlines()[1]
    assert line.split() == [ids[0][:8], "0", "0", "a", "0", "0.0", "3"]
    rollout = rolltape.read(run).rollout(ids[0])
    assert (rollout.turns[0].facts.reward, rollout.reward) == (3, 1)
    missing = cli("score", run, ids[0], "3", "--turn", "0.9")
    assert missing.code == 2
    assert f"turn {ids[0]}.0.0.9: its session has 1 turns" in missing.err


def test_many_come_from_a_file(cli: Cli, run: Path, ids: list[str], tmp_path: Path) -> None:
    file = rewards_file(
        tmp_path,
        {"rollout": ids[2], "reward": 0.75, "terms": {"style": 1}},
        "",
        {"rollout": ids[0][:8], "reward": 1, "by": "judge"},
        f'{{"rollout": "{ids[1]}", "reward": NaN}}',
    )
    result = cli("score", run, "--from", file, "--by", "file")
    assert result.out.splitlines()[-1] == "3 rewards: 3 recorded, 2 changed"
    assert [row.outcome.rewarded_by for row in index(run).values()] == ["judge", "file", "file"]
    *lines, summary = rows(cli("score", run, "--from", file, "--by", "file", "--json"))
    assert [line["reward"] for line in lines] == [0.75, 1.0, {"$float": "nan"}]
    assert summary == {"rewards": 3, "recorded": 0, "changed": 0, "skipped": 0, "dry_run": False}


@pytest.fixture
def foreign_run(tmp_path: Path) -> Path:
    path = tmp_path / "foreign"
    with rolltape.open(path, name="exp") as tape:
        for attempt, name in enumerate(["trace-a", "trace-b"]):
            tape.rollout(task_id="t", attempt=attempt, foreign_ids=[name]).finish()
    return path


def test_the_results_of_another_program_are_joined_by_its_own_ids(cli: Cli, foreign_run: Path, tmp_path: Path) -> None:
    file = rewards_file(
        tmp_path,
        {"id": "trace-b", "result": {"score": 1.0, "parts": {"exact": 1, "note": "x"}}, "messages": []},
        {"id": "elsewhere", "result": {"score": 0.0, "parts": {}}},
        {"id": "trace-a", "result": {"score": 0.5, "parts": {"exact": 0}}},
    )
    how = ["--id-field", "id", "--reward-field", "result.score", "--term-field", "result.parts", "--by", "them"]
    refused = cli("score", foreign_run, "--from", file, *how)
    assert refused.code == 2
    assert f"{file}, line 2: run exp holds no rollout 'elsewhere'" in refused.err
    assert said(foreign_run, EventKind.SCORE) == []
    result = cli("score", foreign_run, "--from", file, *how, "--skip-unknown")
    assert result.out.splitlines()[-1] == "2 rewards: 2 recorded, 2 changed"
    assert "1 line skipped, the first is line 2: the run holds no such rollouts" in result.err
    outcomes = [row.outcome for row in index(foreign_run).values()]
    assert [(one.reward, one.reward_terms) for one in outcomes] == [(0.5, {"exact": 0}), (1.0, {"exact": 1})]
    assert rows(cli("score", foreign_run, "--from", file, *how, "--skip-unknown", "--json"))[-1]["skipped"] == 1


def test_commands_take_a_foreign_id_where_they_take_an_id(cli: Cli, foreign_run: Path) -> None:
    ids = list(index(foreign_run))
    assert [row["foreign_ids"] for row in rows(cli("ls", foreign_run, "--json"))] == [["trace-a"], ["trace-b"]]
    for command in ("show", "tree", "trace", "samples", "ledger"):
        named, own = (cli(command, foreign_run, name) for name in ("trace-b", ids[1]))
        assert (named.code, named.out) == (0, own.out)
    assert cli("score", foreign_run, "trace-b", "0.25").code == 0
    assert [row.reward for row in index(foreign_run).values()] == [None, 0.25]


def test_many_come_from_standard_input(cli: Cli, run: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps({"rollout": one, "reward": 0.25}) + "\n" for one in ids)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert cli("score", run, "--from", "-").out.splitlines()[-1] == "3 rewards: 3 recorded, 3 changed"
    assert [row.outcome.reward for row in index(run).values()] == [0.25] * 3


def test_a_long_list_is_cut_and_counted(cli: Cli, tmp_path: Path) -> None:
    ids = record_group(tmp_path / "many", "a", [0.0] * 25)
    file = rewards_file(tmp_path, *({"rollout": one, "reward": 1} for one in ids))
    lines = cli("score", tmp_path / "many", "--from", file).out.splitlines()
    assert len(lines) == 23
    assert lines[-2:] == ["… and 5 more", "25 rewards: 25 recorded, 25 changed"]


def test_a_dry_run_records_nothing(cli: Cli, run: Path, ids: list[str]) -> None:
    assert cli("score", run, ids[0], "5", "--dry-run").out.splitlines()[-1] == "1 reward: 1 to record, 1 changed"
    assert index(run)[ids[0]].outcome.reward == 1


def test_bad_lines_are_told_with_file_and_line_and_nothing_is_recorded(
    cli: Cli, run: Path, ids: list[str], tmp_path: Path
) -> None:
    file = rewards_file(tmp_path, {"rollout": ids[0], "reward": 5}, {"rollout": ids[1], "reward": "5"}, "{")
    result = cli("score", run, "--from", file)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [
        f"rolltape: {file}: 2 entries cannot be used, and no reward was recorded",
        f"  line 2: rollout {ids[1]}: reward is '5', a str; give a number",
        "  line 3, column 2: not valid JSON (expecting property name enclosed in double quotes); "
        "write one object per line",
    ]
    assert len(said(run, EventKind.SCORE)) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give ROLLOUT and REWARD, or --from FILE"),
        (["ID"], "give ROLLOUT and REWARD, or --from FILE"),
        (["ID", "good"], "REWARD good: give a number"),
        (["zz", "1"], "holds no rollout 'zz'"),
        (["ID", "1", "--try", "4"], "has no try 4; it has 0"),
        (["ID", "1", "--term", "style"], "--term style: give a name and a number, such as style=0.5"),
        (["ID", "1", "--term", "a=1", "--term", "a=2"], "--term a=2: a is given twice"),
        (["ID", "1", "--turn", "last"], "not a turn's id"),
        (["ID", "1", "--id-field", "id"], "--id-field needs --from"),
        (["ID", "1", "--skip-unknown"], "--skip-unknown needs --from"),
        (["--form", "rewards.jsonl"], "unknown option --form"),
        (["ID", "1", "--from", "x.jsonl"], "--from x.jsonl: ROLLOUT must be given in the file"),
        (["--from", "x.jsonl", "--try", "1"], "--from x.jsonl: --try must be given in the file"),
        (["--from", "/no/such.jsonl"], "/no/such.jsonl: there is no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told(cli: Cli, run: Path, ids: list[str], arguments: list[str], told: str) -> None:
    result = cli("score", run, *(ids[0] if argument == "ID" else argument for argument in arguments))
    assert (result.code, result.out) == (2, "")
    assert told in result.err
    assert result.err.count("\n") == 1


def test_what_does_not_count_is_remarked(cli: Cli, run: Path, ids: list[str]) -> None:
    with rolltape.open(run) as tape:
        broken = tape.rollout(task_id="broken")
        broken.fail("the sandbox is gone")
        tape.filter(ids[0], "too easy")
        running = tape.rollout(task_id="running")
        errors = [cli("score", run, one, "1.5").err for one in (broken.id, ids[0], running.id)]
        running.finish()
    assert [error.split(";")[0] for error in errors] == [
        "rolltape: 1 rollout failed or lost",
        "rolltape: 1 rollout filtered, and a reward does not change that",
        "rolltape: 1 rollout still running",
    ]
    rewards = {row.head.task_id: row.outcome.reward for row in index(run).values()}
    assert (rewards["broken"], rewards["running"]) == (None, 1.5)


def test_a_rollout_that_another_process_records_is_rewarded(cli: Cli, run: Path) -> None:
    command = [sys.executable, "-c", RECORDER, str(run)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        rollout = other.stdout.readline().strip()
        assert cli("score", run, rollout, "0.5").code == 0
        other.communicate("\n", timeout=60)
    assert other.returncode == 0
    assert index(run)[rollout].outcome.reward == 0.5


def test_a_sealed_run_takes_rewards(cli: Cli, run: Path, ids: list[str]) -> None:
    rolltape.seal(run)
    cli("score", run, ids[0], "0.5")
    rolltape.seal(run)
    cli("score", run, ids[0], "0.25")
    assert [event.data["reward"] for event in said(run, EventKind.SCORE) if event.rollout == ids[0]] == [1, 0.5, 0.25]
    assert index(run)[ids[0]].outcome.reward == 0.25
    assert cli("check", run).code == 0
