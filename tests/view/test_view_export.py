"""What the table matches is exported as `rolltape export` writes it."""

import csv
import io
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

import rolltape
from commands import Cli
from rolltape.errors import NoAnswer
from rolltape.view.run.run_answers import RunAnswers
from stepped_runs import record_stepped
from viewed import ask_bytes, page_over
from viewing import answers_for


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_stepped(tmp_path_factory.mktemp("export") / "exp")


@pytest.fixture(scope="module")
def answers(run: Path) -> Iterator[RunAnswers]:
    with answers_for(run) as answers:
        yield answers


def _exported(answers: RunAnswers, **query: str) -> bytes:
    return b"".join(answers.export(query, None)())


@pytest.mark.parametrize("policy", ["exact", "slime"])
def test_samples_are_those_that_the_command_writes(answers: RunAnswers, run: Path, cli: Cli, policy: str) -> None:
    written = cli("export", run, "--step", "1", "--policy", policy).out
    assert _exported(answers, form="samples", step="1", policy=policy).decode() == written


def test_rollouts_are_those_that_the_command_writes(answers: RunAnswers, run: Path, cli: Cli) -> None:
    written = cli("export", run, "--what", "rollouts", "--task", "dates").out
    assert _exported(answers, form="rollouts", task="dates").decode() == written


def test_advantages_are_over_the_whole_group_if_only_some_of_it_is_exported(answers: RunAnswers) -> None:
    lines = _exported(answers, form="samples", task="hard-2", rewarded="yes").splitlines()
    assert [json.loads(line)["advantage"] for line in lines] == [0.75]


def test_a_csv_has_the_tables_order_and_no_formulas(tmp_path: Path) -> None:
    tasks = ["=1+1", "plain", 'a "quoted", one\nwith a line', "-x"]
    with rolltape.open(tmp_path / "run") as tape:
        for number, task in enumerate(tasks):
            with tape.rollout(task_id=task, tags=("a", "b")) as rollout:
                rollout.finish(reward=float(number), reward_terms={"=t": -float(number)} if number else {})
    with answers_for(tmp_path / "run") as answers:
        rows = list(csv.DictReader(io.StringIO(_exported(answers, sort="-reward").decode())))
        assert _exported(answers, task="none") == b""
    assert [row["task"] for row in rows] == ["'-x", tasks[2], "plain", "'=1+1"]
    assert [row["term.=t"] for row in rows] == ["-3.0", "-2.0", "-1.0", ""]
    assert rows[0]["tags"] == "a b"


@pytest.mark.parametrize("query", [{"form": "xml"}, {"form": "samples", "policy": "best"}, {"sort": "color"}])
def test_an_export_that_cannot_be_made_says_what_can(answers: RunAnswers, query: dict[str, str]) -> None:
    with pytest.raises(NoAnswer, match="give"):
        answers.export(query, None)


def test_a_server_sends_the_file_as_it_is_made_and_answers_mistakes(run: Path) -> None:
    with page_over(run) as address:
        assert len(ask_bytes(address, "/api/exp/export?form=rollouts&q=answer&step=0").splitlines()) == 12
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask_bytes(address, "/api/exp/export?form=xml")
    assert refused.value.code == 400
