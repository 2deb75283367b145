"""A run that 0.1.0 recorded opens, lists, resumes, linearizes and views, and its token records are joined."""

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rolltape
from commands import Cli
from rolltape.records.policy import PRESETS
from rolltape.records.sample import Fate
from rolltape.tokens import read_tokens
from viewing import asking

_FIXTURE = Path(__file__).parents[1] / "fixtures" / "run-0.1.0"
_EXPECTED = json.loads((_FIXTURE / "expected.json").read_text())
_COLLECT = ("--step", 3, "-g", 2, "--max-concurrent", 1, "--max-tokens", 12)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy: readers write caches."""
    shutil.copytree(_FIXTURE / "run", tmp_path / "exp")
    return tmp_path / "exp"


def listed(cli: Cli, run: Path) -> list[dict[str, Any]]:
    shown = cli("ls", run, "--json")
    assert shown.code == 0, shown.err
    return [json.loads(line) for line in shown.out.splitlines()]


def test_it_lists_the_same_rollouts(cli: Cli, run: Path) -> None:
    for expected, row in zip(_EXPECTED["rollouts"], listed(cli, run), strict=True):
        assert {name: row[name] for name in expected} == expected


def test_every_sampled_token_has_a_fate_under_every_policy(run: Path) -> None:
    rollouts = list(rolltape.read(run).rollouts())
    assert Counter(one.status.value for one in rollouts) == {"finished": 9, "failed": 2, "lost": 1}
    for policy in PRESETS:
        for rollout in rollouts:
            made = rolltape.linearize(rollout, policy)
            fates = made.ledger.totals()
            sampled = sum(len(turn.sampled_ids) for session in rollout.sessions for turn in session.turns)
            assert sum(fates.values()) == sampled
            assert sum(sample.trained_tokens for sample in made.samples()) == fates.get(Fate.TRAINED, 0)


def test_a_collection_resumes_with_what_was_lost_or_never_begun(cli: Cli, run: Path) -> None:
    shown = cli("collect", _FIXTURE / "tasks.jsonl", "--run", run, *_COLLECT, "--resume")
    assert shown.code == 0, shown.err
    rows = [row for row in listed(cli, run) if row["step"] == 3]
    assert [(row["task_id"], row["attempt"], row["try_index"], row["status"]) for row in rows] == [
        ("sum-1", 0, 0, "finished"),
        ("sum-1", 1, 0, "lost"),
        ("sum-1", 1, 1, "finished"),
        ("sum-2", 0, 0, "finished"),
        ("sum-2", 1, 0, "finished"),
    ]


def test_a_trainer_gets_no_group_again(run: Path) -> None:
    with rolltape.open(run) as tape:
        steps = [group.step for group in tape.groups(complete=False, consumer="trainer")]
    assert 2 not in steps
    assert 0 in steps


def test_the_page_shows_it(run: Path) -> None:
    async def ask() -> tuple[Any, Any]:
        async with asking(run) as server:
            return await server.caught_up("exp"), await server.json("/api/exp/rollouts?sort=step")

    overview, rows = asyncio.run(ask())
    assert overview["statuses"] == {"finished": 9, "failed": 2, "lost": 1}
    assert overview["problems"] == 0
    assert overview["versions"] == ["1", "2", "0"]  # as announced; the collection's engine began with 0
    assert {(row["id"], row["try"]) for row in rows["rows"]} == {
        (row["rollout"], row["try_index"]) for row in _EXPECTED["rollouts"]
    }


def test_its_token_records_are_joined_to_turns(cli: Cli, run: Path) -> None:
    records = list(read_tokens(run))
    assert [record.sample for record in records] == _EXPECTED["sample_ids"]
    for record in records:
        shown = cli("tokens", run, "turns", record.sample, "--json")
        assert shown.code == 0, shown.err
        assert record.sample is not None
        (joined,) = (json.loads(line) for line in shown.out.splitlines())
        (parts,) = (value for value in joined.values() if isinstance(value, list))
        turn = record.sample.partition("@")[0].rpartition(".")[0]
        trained = {part["turn"]: part["trained_tokens"] for part in parts if part["origin"] == "sampled"}
        assert trained == {f"{turn}.0": 2, f"{turn}.1": 3}


def test_its_exported_samples_are_read(run: Path) -> None:
    samples = list(rolltape.read_samples(_FIXTURE / "samples.parquet"))
    assert {sample.rollout for sample in samples} <= {row["rollout"] for row in _EXPECTED["rollouts"]}
    assert sum(sample.trained_tokens for sample in samples) == 46
