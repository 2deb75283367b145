"""Every command's `--json` output is what its schema in the reference says, and every schema is that of a real line."""

import asyncio
import json
import re
from pathlib import Path

import jsonschema
import pytest
from reference_docs.json_schemas import RECORDS, schema_of

from collecting import instant, task_file
from commands import Cli, rows
from gateways import rig
from import_sources import trajectory
from json_lines import check_lines, schemas_of
from rolltape.cli import run as rolltape_command
from rolltape.cli.app import STAGES
from rolltape.cli.record.collect_progress import JsonProgress
from rolltape.collect.environments import judge
from rolltape.collect.stats import CollectionStats
from rolltape.demo import record_scripted
from rolltape.tiny import shipped_model

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ROLLOUT = "857bc8a1"
# What is typed after one another on a copy of the scripted run, and the schemas of what each prints.
PRINTED: dict[str, list[tuple[str, set[str]]]] = {
    "look": [
        ("ls RUN", {"ls"}),
        (f"tree RUN {ROLLOUT}", {"tree"}),
        (f"show RUN {ROLLOUT}", {"show"}),
        (f"show RUN {ROLLOUT} --color-by logprob", {"show"}),
        (f"trace RUN {ROLLOUT}", {"trace"}),
        (f"trace RUN {ROLLOUT} --whole-prompts", {"trace"}),
        ("query RUN SELECT\u00a0*\u00a0FROM\u00a0rollouts", {"query"}),
        ("compare RUN RUN", {"compare", "compare-task"}),
        ("push RUN --to OUT", {"push"}),
        ("push RUN --to OUT", {"push"}),
    ],
    "train": [
        ("samples RUN", {"samples"}),
        ("samples RUN --compare keep-head", {"compare-policy", "compare-difference"}),
        ("ledger RUN", {"ledger"}),
        ("ledger RUN --turns", {"ledger"}),
    ],
    "judge": [
        ("filter RUN --stale 0", {"filter", "filter-rollout"}),
        ("filter RUN", {"filter", "filter-rollout"}),
        (f"score RUN {ROLLOUT} 0.5", {"score", "score-rollout"}),
        (f"tag RUN {ROLLOUT} odd --turn 0.0 --tokens 1:3 --by ada", {"tag-rollout"}),
        ("tag RUN", {"tag"}),
        (f"note RUN {ROLLOUT} why? --by ada", {"note"}),
        ("score RUN --ungraded", {"ungraded"}),
    ],
    "keep": [
        ("check RUN", {"check"}),
        ("seal RUN", {"seal"}),
        ("prune RUN --before-step 100 --dry-run", {"prune"}),
        ("prune RUN --before-step 100 --yes", {"prune"}),
    ],
}


def printed(cli: Cli, *words: object) -> set[str]:
    """The schemas of what a command prints."""
    result = cli(*words, "--json")
    return set(check_lines(str(words[0]), rows(result)))


@pytest.mark.parametrize("stage", PRINTED)
def test_commands_on_a_run_print_what_their_schemas_say(stage: str, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    record_scripted(run)
    places = {"RUN": run, "OUT": tmp_path / "steps.jsonl"}
    for typed, expected in PRINTED[stage]:
        words = [places.get(word, word.replace("\u00a0", " ")) for word in typed.split(" ")]
        assert printed(cli, *words) == expected, typed


COLLECTED = {"collect-dry-run", "collect-launch", "collect-rollout", "collect-end", "ungraded", "ungraded-rollout"}


def test_a_collection_prints_what_its_schemas_say(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_PAUSE_S", 0.001)
    source, run = task_file(tmp_path), tmp_path / "run"
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model())
        kinds = printed(cli, "collect", source, "--run", run, "--dry-run", *how)
        kinds |= printed(cli, "collect", source, "--run", run, "-g", 2, *how)
    nowhere = {"base_url": "http://127.0.0.1:9/v1", "model": "j"}
    rubric = {"id": "r", "environment": "rubric", "prompt": "Say hello.", "criteria": ["polite"]}
    source = task_file(tmp_path, [rubric | {"judge": nowhere}], "rubric.jsonl")
    with instant().in_thread() as engine:
        how = ("--engine", f"sglang:{engine.url}", "--model", shipped_model())
        kinds |= printed(cli, "collect", source, "--run", tmp_path / "judged", "-g", 1, *how)
    kinds |= printed(cli, "score", tmp_path / "judged", "--ungraded")
    assert kinds == COLLECTED


TOLD = {"collect-progress", "collect-ending"}


def test_events_of_a_running_collection_are_what_their_schemas_say(capsys: pytest.CaptureFixture[str]) -> None:
    progress = JsonProgress()
    progress.progress(CollectionStats().figures())
    progress.stopping(30.0)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert set(check_lines("collect", lines)) == TOLD


OTHERS = {"doctor", "import", "import-guess", "status"}


async def test_a_model_an_import_and_a_gateway_are_told_of_as_their_schemas_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(trajectory()))
    commands = [
        ["doctor", "--model", str(shipped_model())],
        ["import", "--guess", str(file)],
        ["import", "atif", str(file), str(tmp_path / "imported")],
    ]
    kinds = set()
    async with rig(tmp_path / "run", ["one"]) as it:
        await it.ask(await it.open(), "hello")
        commands.append(["status", it.gateway.url, "--admin-key", it.gateway.admin_key])
        for words in commands:
            capsys.readouterr()
            assert await asyncio.to_thread(rolltape_command, [*words, "--json"]) == 0, words
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            kinds.update(check_lines(words[0], lines))
    assert kinds == OTHERS


TOKENS = {name for name in RECORDS if name.startswith("token-")} | {"check", "breach"}


def test_token_records_are_told_of_as_their_schemas_say(tmp_path: Path, cli: Cli) -> None:
    import rolltape
    from trained_runs import STEP, export_samples, record_groups, samples_of

    run = record_groups(tmp_path / "run", groups=2)
    samples = samples_of(run)
    export_samples(run, samples[:-1], lambda seen: seen[0].ids.__setitem__(0, 5))
    with rolltape.open(run) as tape:
        tape.score(samples[1].rollout, reward=0.125)
    kinds = printed(cli, "check", run)
    for words in ([], ["list", "--step", STEP], ["summary"], ["worst"], ["check"]):
        kinds |= printed(cli, "tokens", run, *words)
    for action in ("show", "turns"):
        kinds |= printed(cli, "tokens", run, action, f"{STEP}.0.0")
    assert kinds == TOKENS


def test_every_schema_is_that_of_a_line_above_and_on_the_page() -> None:
    typed = [kinds for lines in PRINTED.values() for _, kinds in lines]
    assert set().union(COLLECTED, TOLD, OTHERS, TOKENS, *typed) == set(RECORDS)
    assert set(re.findall(r"schemas/([\w-]+)\.json", (REFERENCE / "json.md").read_text())) == set(RECORDS)
    assert {file.stem for file in (REFERENCE / "schemas").glob("*.json")} == set(RECORDS)


def test_every_command_with_json_output_has_a_schema(cli: Cli) -> None:
    commands = [name for stage in STAGES.values() for name in stage]
    told = {name for name in commands if re.search(r"--json\b", cli(name, "--help").out)}
    assert {name for name in commands if schemas_of(name)} == told


def test_a_schema_refuses_a_value_of_another_type(tmp_path: Path, cli: Cli) -> None:
    record_scripted(tmp_path / "run")
    line = rows(cli("ls", tmp_path / "run", "--json"))[0]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(line | {"attempt": "first"}, schema_of("ls"))
    with pytest.raises(AssertionError, match="no schema allows"):
        check_lines("ls", [line | {"another": 1}])
