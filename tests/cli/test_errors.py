"""What goes wrong is one line on standard error, and an exit code that says what kind of thing it is."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import rolltape
from commands import Cli, rows

READING = [
    ["ls"],
    ["tree"],
    ["samples"],
    ["ledger"],
    ["show"],
    ["export"],
    ["query", "SELECT 1"],
    ["check"],
    ["seal"],
    ["prune", "--step", "1"],
    ["filter", "--no-spread"],
    ["score", "id", "1"],
]


def on(command: list[str], run: object) -> list[object]:
    return [command[0], run, *command[1:]]


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_a_missing_run_is_named(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    result = cli(*on(command, tmp_path / "none"))
    assert (result.code, result.out) == (3, "")
    assert result.err == f"rolltape: {tmp_path / 'none'}: no run there (run.json is missing)\n"


def test_a_folder_of_runs_names_those_in_it(cli: Cli, tmp_path: Path) -> None:
    for name in ("b", "a"):
        rolltape.open(tmp_path / name).close()
    told = f"rolltape: {tmp_path}: no run there (run.json is missing); name one of the runs in it: a, b\n"
    assert (cli("ls", tmp_path).code, cli("ls", tmp_path).err) == (3, told)


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_an_empty_run_is_named(cli: Cli, tmp_path: Path, command: list[str]) -> None:
    rolltape.open(tmp_path / "new").close()
    result = cli(*on(command, tmp_path / "new"))
    assert (result.code, result.out) == (3, "")
    assert result.err == f"rolltape: {tmp_path / 'new'}: the run holds no rollouts yet\n"


def test_an_empty_run_has_no_pages(cli: Cli, tmp_path: Path) -> None:
    rolltape.open(tmp_path / "new").close()
    result = cli("view", tmp_path / "new", "--static", tmp_path / "pages")
    assert result == (3, "", f"rolltape: {tmp_path / 'new'}: the run holds no rollouts yet\n")


@pytest.mark.parametrize("command", READING, ids=lambda command: command[0])
def test_a_newer_run_is_refused(cli: Cli, run: Path, command: list[str]) -> None:
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"schema": "2.0"}))
    result = cli(*on(command, run))
    assert (result.code, result.out) == (3, "")
    assert "written with schema 2.0" in result.err
    assert result.err.count("\n") == 1


def test_a_file_that_is_no_run_is_refused(cli: Cli, run: Path) -> None:
    (run / "run.json").write_text("{}")
    result = cli("ls", run)
    assert result.code == 3
    assert result.err.count("\n") == 1


def damaged(run: Path) -> None:
    """Change a byte of a turn's ids behind the program's back."""
    (journal,) = (run / "journals").glob("*.sqlite")
    with sqlite3.connect(journal) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        table = next(name for name in sorted(tables) if name.startswith("turn"))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        blobs = [
            name
            for name in columns
            if connection.execute(f"SELECT 1 FROM {table} WHERE typeof({name}) = 'blob' AND length({name})").fetchone()
        ]
        connection.execute(f"UPDATE {table} SET {blobs[0]} = x'00ff00' || {blobs[0]}")
    connection.close()


def test_a_damaged_run_gives_what_can_be_read_and_says_so(cli: Cli, run: Path) -> None:
    damaged(run)
    for command in (["samples"], ["ledger"]):
        result = cli(*command, run)
        assert result.code == 3
        assert "Traceback" not in result.err
        assert "`rolltape check` lists them" in result.err
    checked = cli("check", run)
    assert checked.code == 1
    assert "[readable]" in checked.out
    *breaches, summary = rows(cli("check", run, "--json"))
    assert all(breach.keys() == {"rule", "where", "what"} for breach in breaches)
    assert summary["breaches"] == len(breaches) > 0


@pytest.mark.parametrize("command", [["ls"], ["score", "--ungraded"]], ids=["ls", "ungraded"])
def test_a_journal_that_is_none_is_reported(cli: Cli, run: Path, command: list[str]) -> None:
    (run / "journals" / "other.sqlite").write_bytes(b"no database" * 1000)
    result = cli(*on(command, run))
    assert result.code == 3
    assert "other.sqlite" in result.err
    assert result.err.endswith(" problems in this run; `rolltape check` lists them\n")


@pytest.mark.parametrize("command", [["seal"], ["prune", "--step", "1", "--yes"]], ids=["seal", "prune"])
def test_a_command_that_changes_files_refuses_a_url(cli: Cli, run: Path, command: list[str]) -> None:
    url = f"file://{run}"
    said = f"rolltape: RUN {url}: a URL; give the run directory itself, whose files this command changes\n"
    assert cli(*on(command, url)) == (2, "", said)


def test_a_changed_shard_fails_the_check(cli: Cli, run: Path) -> None:
    cli("seal", run)
    shard = max((run / "shards").rglob("*.parquet"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    result = cli("check", run)
    assert result.code == 1
    assert shard.name in result.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["samples", "--policy", "greedy"], "--policy: there is no policy 'greedy'; known are exact, keep-head, slime"),
        (["samples", "--compare", "greedy"], "--compare: there is no policy 'greedy'"),
        (["samples", "--compare", "exact"], "--compare exact: this is the policy itself"),
        (["samples", "--max-sample-tokens", "0"], "--max-sample-tokens: "),
        (["samples", "--max-staleness", "-1"], "--max-staleness: "),
        (["samples", "--reward-share", "half"], "--reward-share"),
        (["samples", "--max-sample-tokens", "many"], "--max-sample-tokens"),
        (["samples", "--nonsense"], "--nonsense"),
        (["samples", "zzzz"], "holds no rollout 'zzzz'"),
        (["show"], "ROLLOUT: the run holds 2; name one"),
        (["show", "a.b@exact"], "not a sample id"),
        (["show", "a.².0.0@exact"], "not a sample id"),
        (["tree"], "ROLLOUT: the run holds 2; name one"),
        (["ls", "--limit", "0"], "--limit"),
        (["ledger", "--try", "0"], "--try: name the ROLLOUT"),
        (["ledger", "--tokenizer", "/none"], "--tokenizer /none: not found"),
        (["ledger", "--tokenizer", __file__], "is not a tokenizer"),
        (["export", "--whole-prompts"], "--whole-prompts needs --what turns"),
        (["export", "--format", "xml"], "--format"),
        (["export", "-o", "x.parquet", "--format", "jsonl"], "--format jsonl contradicts -o x.parquet"),
        (["export", "-o", "x.jsonl", "--format", "parquet"], "--format parquet contradicts -o x.jsonl"),
        (["query", ""], "SQL: no statement"),
        (["query", "; -- nothing"], "SQL: no statement"),
        (["query", "SELECT error('so') FROM rollouts"], "SQL: Invalid Input Error: so"),
        (["query", "SELEC 1"], "SQL: Parser Error"),
        (["query", "SELECT nothing FROM rollouts"], "SQL: Binder Error"),
        (["query", "SELECT * FROM tokens"], "SQL: Catalog Error: Table with name tokens does not exist!"),
        (["prune"], "nothing to prune; give --before-step, --step, or --side-array"),
        (["push", "--to", "x.jsonl", "--view-url", "foo"], "--view-url foo: not a URL"),
        (["filter", "--reject", "rules"], "--reject: rules names no function"),
        (["score", "--judge-model", "m"], "--judge-model needs --ungraded"),
        (["score", "--ungraded", "--skip-unknown"], "--ungraded grades all rollouts without a grade; leave out --skip"),
        (["query", "SELECT 1", "--format", "csv", "--json"], "--json: --format csv is given too"),
        (["tokens", "--limit", "3"], "--limit: list does not use it; leave it out, or give worst"),
        (["tokens", "check", "--column", "ratio"], "--column: check does not use it; leave it out, or give show or wo"),
        (
            ["tokens", "summary", "--advantage", "auto"],
            "--advantage: summary does not use it; leave it out, or give ch",
        ),
        (["tokens", "check", "--rank", "0"], "--rank: check does not use it; leave it out, or give list, summary, sh"),
        (["tokens", "worst", "0.0.0"], "RECORD: worst does not use it; leave it out, or give show or turns"),
        (
            ["tokens", "summary", "--tokenizer", "t"],
            "--tokenizer: summary does not use it; leave it out, or give show,",
        ),
        (["tokens", "--rank", "0"], "--rank: list needs --step"),
        (["ls", "--step", "x"], "'--step': 'x' should be a valid integer\n"),
        (["ls", "--limit=0"], "'--limit': '0' should be greater than or equal to 1\n"),
        (["query", "SELECT 1", "--format", "xml"], "'--format': 'xml' is not one of 'table'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_names_the_flag(cli: Cli, run: Path, arguments: list[str], named: str) -> None:
    result = cli(*on(arguments, run))
    assert (result.code, result.out) == (2, "")
    assert named in result.err
    assert result.err.startswith("rolltape: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["slime", "x.pt", "run", "--traces", "t.jsonl"],
            "--traces: slime does not use it; leave it out, or import prime",
        ),
        (["--guess", "x.pt", "--step", "3"], "--guess takes only a path; leave out --step"),
        (["slime", "--guess", "x.pt"], "--guess takes only a path; leave out KIND"),
    ],
    ids=["traces", "guess with a flag", "guess with a kind"],
)
def test_an_import_refuses_what_it_does_not_use(cli: Cli, arguments: list[str], said: str) -> None:
    result = cli("import", *arguments)
    assert (result.code, result.out) == (2, "")
    assert said in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls"], "Missing argument 'RUN'; see `rolltape ls --help`"),
        (["ls", "a", "b"], "Got unexpected extra argument(s) (b); see `rolltape ls --help`"),
        (["ls", "a", "--status", "failed"], "; see `rolltape ls --help`"),
        (["frobnicate"], "No such command 'frobnicate'; see `rolltape --help`"),
        (["--frobnicate"], "No such option: --frobnicate; see `rolltape --help`"),
        (["lss"], "No such command 'lss'. Did you mean 'ls'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_says_where_the_help_is(cli: Cli, arguments: list[str], said: str) -> None:
    result = cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith(f"{said}\n")


@pytest.mark.parametrize("command", ["score", "tag", "note"])
def test_a_turn_that_cannot_be_one_is_named_with_its_flag(cli: Cli, run: Path, rollout_id: str, command: str) -> None:
    result = cli(command, run, rollout_id, "1", "--turn", "x")
    said = "rolltape: --turn x: not a turn's id; give one, or SESSION.TURN, such as 0.3\n"
    assert (result.code, result.out, result.err) == (2, "", said)


def test_tokens_of_a_missing_run_name_the_run(cli: Cli, tmp_path: Path) -> None:
    result = cli("tokens", tmp_path / "none")
    assert (result.code, result.err) == (3, f"rolltape: {tmp_path / 'none'}: no run there (run.json is missing)\n")


def test_an_output_that_cannot_be_written(cli: Cli, run: Path, tmp_path: Path) -> None:
    result = cli("export", run, "-o", tmp_path / "no" / "x.jsonl")
    assert (result.code, result.out) == (4, "")
    assert result.err == f"rolltape: {tmp_path / 'no' / 'x.jsonl'} cannot be written: No such file or directory\n"


def test_an_ending_that_says_nothing_takes_any_format(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert cli("export", run, "-o", tmp_path / "x.out", "--format", "parquet").code == 0
    assert (tmp_path / "x.out").read_bytes().startswith(b"PAR1")


def test_a_port_in_use_is_named_with_what_to_do(cli: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = [cli("serve", tmp_path / "run", "--port", port), cli("engine", "--port", port)]
    told = (
        f"rolltape: 127.0.0.1:{port} cannot be listened on: Address already in use; give another port, or 0 for any\n"
    )
    assert [(one.code, one.err) for one in refused] == [(2, told)] * 2


def test_an_address_of_another_machine_is_named_with_what_to_do(cli: Cli) -> None:
    result = cli("engine", "--host", "192.0.2.1", "--port", "0", "--api-key", "k")
    reason = "Cannot assign requested address; give an address of this machine"
    assert (result.code, result.err) == (2, f"rolltape: 192.0.2.1:0 cannot be listened on: {reason}\n")


def test_no_command_shows_the_help(cli: Cli) -> None:
    result = cli()
    assert (result.code, result.out) == (2, "")
    assert result.err == cli("--help").out


def test_a_reader_that_goes_away_is_no_error(run: Path) -> None:
    command = f"{sys.executable} -m rolltape.cli export {run} --what turns --whole-prompts | head -c 1"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout, done.stderr) == ("{", "")
