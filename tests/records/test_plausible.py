"""What an engine can have sampled and what not, without alarms about what real engines do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from rolltape.cli import run as rolltape_command
from rolltape.records.rollout import Rollout, SessionHead
from rolltape.records.turn import LARGEST_LOGPROB, TurnFlag, implausibility
from rolltape.tape.recording import intake
from rolltape.tape.recording import rollout as recording
from rolltape.tiny import shipped_model

STOP, OTHER_STOP, VOCABULARY = 90, 91, 100


def why(ids: list[int], logprobs: list[float] | None = None, **sampling: Any) -> str | None:
    given = None if logprobs is None else np.array(logprobs, np.float64)
    return implausibility(np.array(ids, np.int32), given, sampling, vocabulary=VOCABULARY, stop_ids=(STOP, OTHER_STOP))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (why([1, 100, 2]), "sampled id 1 is 100, outside the vocabulary of 100"),
        (why([1, STOP, 2, 3]), "2 sampled ids after the stop id 90"),
        (why([1, OTHER_STOP, 2, STOP]), "2 sampled ids after the stop id 91"),
        (why([STOP, STOP]), "1 sampled ids after the stop id 90"),
        (why([1] * 90, max_tokens=40), "90 sampled ids but max_tokens 40"),
        (why([1] * 90, max_new_tokens=40), "90 sampled ids but max_tokens 40"),
        (why([1, 2], [-0.5, 0.25]), "the logprob of sampled id 1 is 0.25, above zero"),
        (why([1, 2], [float("nan"), 0.25]), "the logprob of sampled id 1 is 0.25, above zero"),
        (why([1, 2], [-1.0, float("inf")]), "the logprob of sampled id 1 is inf, above zero"),
    ],
)
def test_what_cannot_have_been_sampled_is_said(found: str | None, expected: str) -> None:
    assert found == expected


@pytest.mark.parametrize(
    "found",
    [
        why([]),
        why([1, 2, STOP]),  # the stop id comes last
        why([1, 2, OTHER_STOP], max_tokens=3),
        why([STOP]),
        why([1, 2, 99]),  # the last id of the vocabulary; cut by its length or a stop string
        why([1, STOP, 2], ignore_eos=True),
        why([STOP, 2, STOP], min_tokens=1),
        why([1] * 90),
        why([1] * 90, max_tokens=-1),  # llama.cpp: no limit
        why([1] * 90, max_tokens=None),
        why([1, 2], [-0.0, 1e-6]),  # rounding
        why([1, 2], [float("nan"), -0.5]),
        why([1, 2], [float("-inf"), LARGEST_LOGPROB]),
    ],
)
def test_what_real_engines_give_is_plausible(found: str | None) -> None:
    assert found is None


IMPLAUSIBLE: list[dict[str, Any]] = [
    {"sampled_ids": [1, 900_000, 0], "logprobs": [-1.0, -1.0, -1.0]},
    {"sampled_ids": [1, 0, 2, 0], "logprobs": [-1.0, -1.0, -1.0, -1.0]},
    {"sampled_ids": [1] * 90, "logprobs": [-1.0] * 90, "sampling": {"max_tokens": 40}, "finish": "length"},
    {"sampled_ids": [1, 0], "logprobs": [-1.0, 0.5]},
]


def record(run: Path, turns: list[dict[str, Any]], **session: Any) -> Rollout:
    with rolltape.open(run) as tape, tape.rollout(task_id="t") as rollout:
        recorder = rollout.session(stop_ids=[0], tokenizer=str(shipped_model()), **session)
        for at, turn in enumerate(turns):
            messages = [{"role": "user", "content": f"{at}"}]
            recorder.record_turn(**{"prompt_messages": messages, "prompt_ids": [5, 6, at], "finish": "stop", **turn})
        rollout.finish(reward=1.0)
    (found,) = rolltape.read(run).rollouts()
    return found


@pytest.mark.parametrize("policy", ["exact", "keep-head", "slime"])
def test_implausible_turns_of_any_recorder_are_flagged_and_masked(tmp_path: Path, policy: str) -> None:
    rollout = record(tmp_path / "run", [*IMPLAUSIBLE, {"sampled_ids": [1, 0], "logprobs": [-1.0, -1.0]}], vocabulary=9)
    assert [TurnFlag.IMPLAUSIBLE in turn.facts.flags for turn in rollout.turns] == [True] * 4 + [False]
    assert [turn.facts.error for turn in rollout.turns] == [
        "sampled id 1 is 900000, outside the vocabulary of 9",
        "2 sampled ids after the stop id 0",
        "90 sampled ids but max_tokens 40",
        "the logprob of sampled id 1 is 0.5, above zero",
        None,
    ]
    assert rolltape.linearize(rollout, policy).ledger.totals() == {"masked:engine_error": 99, "trained": 2}
    assert rolltape_command(["check", str(tmp_path / "run")]) == 0


def test_a_turn_of_another_model_is_not_held_against_the_sessions_vocabulary(tmp_path: Path) -> None:
    given = {"sampled_ids": [1, 900_000, 0, 3], "logprobs": [-1.0] * 4, "model": "another", "finish": "length"}
    rollout = record(tmp_path / "run", [given], vocabulary=9, model="one")
    assert rollout.turns[0].facts.flags == ()


def test_check_finds_what_an_old_tape_does_not_state_and_it_does_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def old_head(**given: Any) -> SessionHead:
        return SessionHead(**{**given, "flags_faults": False, "vocabulary": None})

    with monkeypatch.context() as as_in_0_1:
        as_in_0_1.setattr(intake, "implausible_in", lambda *_: None)
        as_in_0_1.setattr(recording, "SessionHead", old_head)
        rollout = record(tmp_path / "run", [*IMPLAUSIBLE, {"sampled_ids": [1, 0], "logprobs": [-1.0, -1.0]}])
    assert [turn.facts.flags for turn in rollout.turns] == [()] * 5
    assert rolltape_command(["check", str(tmp_path / "run")]) == 1
    told = [line for line in capsys.readouterr().out.replace("\n ", " ").splitlines() if "[plausible]" in line]
    assert [turn.id in line for turn, line in zip(rollout.turns, told, strict=False)] == [True] * 4
    assert "outside the vocabulary of" in told[0]  # by the tokenizer that the session names
    # Without a tokenizer nobody knows how large its vocabulary is.
    assert rolltape.linearize(rollout).ledger.totals() == {"masked:engine_error": 96, "trained": 5}
