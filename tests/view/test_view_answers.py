"""What the page is told is what the library computes."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rolltape
from rolltape.records.policy import PRESETS, Credit
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.samples.credit import advantages_of
from rolltape.view.rollout import detail
from rolltape.view.rollout.rollout_answers import RolloutAnswers
from sessions import Recording
from strategies import rollouts, searching
from taped import assistant, first_turn, next_turn, record_run, spelled
from view_columns import unpacked
from viewing import answers_for, record

Made = list[tuple[Rollout, list[Recording]]]


@settings(searching, max_examples=searching.max_examples // 10)
@given(st.lists(rollouts(), min_size=1, max_size=3), st.booleans())
def test_every_answer_is_what_the_library_computes(made: Made, sealed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        record(path, made)
        if sealed:
            rolltape.seal(path)
        run = rolltape.read(path)
        with answers_for(path) as answers:
            _check_table(run, answers)
            _check_overview(run, answers)
            for row in run.index():
                _check_rollout(run, answers, run.rollout(*row.key))


def _check_table(run: rolltape.Run, answers: RolloutAnswers) -> None:
    rows = answers.table({}, None)["rows"]
    index = run.index()
    assert [(row["id"], row["try"]) for row in rows] == [row.key for row in index]
    for shown, row in zip(rows, index, strict=True):
        linearized = rolltape.linearize(run.rollout(*row.key))
        assert shown["status"] == row.outcome.status
        assert shown["stop_reason"] == row.outcome.stop_reason
        assert shown["reason"] == row.outcome.reason
        assert shown["reward"] == row.outcome.reward
        assert shown["filter"] == row.outcome.filtered
        assert (shown["turns"], shown["sampled_tokens"]) == (row.turns, row.sampled_tokens)
        assert shown["trained_tokens"] == sum(sample.trained_tokens for sample in linearized.samples())
        assert shown["forks"] == len(linearized.forks)
    assert answers.listing().versions == run.versions()


def _check_overview(run: rolltape.Run, answers: RolloutAnswers) -> None:
    overview = answers.overview(None)
    made = [rolltape.linearize(rollout) for rollout in run.rollouts()]
    ledger: Counter[str] = Counter()
    for one in made:
        ledger.update({fate.value: tokens for fate, tokens in one.ledger.totals().items()})
    assert overview["ledger"] == dict(ledger)
    assert overview["fork_causes"] == Counter(fork.cause.value for one in made for fork in one.forks)
    rewards = [row.outcome.reward for row in run.index() if row.outcome.reward is not None]
    assert (overview["reward"] or {}).get("rollouts", 0) == len(rewards)
    assert overview["reward"] is None or np.isclose(overview["reward"]["mean"], math.fsum(rewards) / len(rewards))
    assert sum(overview["statuses"].values()) == len(run.index())


def _check_rollout(run: rolltape.Run, answers: RolloutAnswers, rollout: Rollout) -> None:
    row = answers.row(rollout.id, str(rollout.head.try_index))
    assert spelled(answers.shown(row).rollout) == spelled(rollout)
    for name, policy in PRESETS.items():
        advantage = advantages_of(run.index(), Credit().advantage)[rollout.key]
        linearized = rolltape.linearize(rollout, policy, versions=run.versions())
        samples = list(linearized.samples(advantage))
        detail = answers.shown(row).detail(name)
        assert detail["ledger"] == {fate.value: tokens for fate, tokens in linearized.ledger.totals().items()}
        assert [_brief(sample) for sample in samples] == [
            {name: shown[name] for name in _brief_names} for shown in detail["samples"]
        ]
        forks = [fork for session in detail["sessions"] for fork in session["forks"]]
        assert [(fork["turn"], fork["parent"], fork["cause"]) for fork in forks] == [
            (fork.turn, fork.departs_from, fork.cause.value) for fork in linearized.forks
        ]
        for sample in samples:
            _check_tokens(answers.shown(row).tokens(sample.index, name), sample)
    _check_conversations(rollout, answers.shown(row).detail(None))


_brief_names = ("id", "index", "session", "tokens", "trained", "reward", "advantage", "loss_weight", "truncated")


def _brief(sample: Sample) -> dict[str, Any]:
    named = {"tokens": len(sample.ids), "trained": sample.trained_tokens}
    return {name: named[name] if name in named else getattr(sample, name) for name in _brief_names}


def _check_tokens(packed: bytes, sample: Sample) -> None:
    header, columns = unpacked(packed)
    assert header["n"] == len(sample.ids)
    np.testing.assert_array_equal(columns["ids"], sample.ids)
    np.testing.assert_array_equal(columns["trained"], sample.trained_mask)
    np.testing.assert_array_equal(columns["sampled"], sample.sampled_mask)
    np.testing.assert_array_equal(columns["logprob"], sample.logprobs.astype(np.float32))
    np.testing.assert_array_equal(columns["version"], sample.version_index)
    assert [tuple(one) for one in header["versions"]] == list(sample.versions)
    assert [(span["start"], span["stop"], span["turn"], span["fate"]) for span in header["spans"]] == [
        (span.start, span.stop, span.turn, span.fate and span.fate.value) for span in sample.spans
    ]
    assert len(columns["text_offsets"]) == len(sample.ids) + 1
    assert columns["text_offsets"][-1] == len(columns["text_utf8"])


def _check_conversations(rollout: Rollout, detail: dict[str, Any]) -> None:
    """Whoever follows parents and puts what is new behind what is kept has the prompt of each turn."""
    turns = {turn.id: turn for turn in rollout.turns}
    held: dict[str, list[str]] = {}
    for session in detail["sessions"]:
        for shown in session["turns"]:
            before = held[shown["parent"]][: shown["kept_messages"]] if shown["parent"] else []
            prompt = before + [message["key"] for message in shown["new_messages"]]
            turn = turns[shown["id"]]
            assert prompt == [message.canonical.hex() for message in turn.prompt.to_list()]
            held[shown["id"]] = prompt + ([shown["reply"]["key"]] if shown["reply"] else [])


def test_the_tokens_of_a_turn_are_its_prompt_and_reply(tmp_path: Path) -> None:
    (rollout_id, *_) = record_run(tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout(rollout_id)
    with answers_for(tmp_path / "run") as answers:
        row = answers.row(rollout_id, None)
        for turn in rollout.turns:
            header, columns = unpacked(answers.shown(row).turn_tokens(turn.id))
            np.testing.assert_array_equal(columns["ids"], turn.tokens.to_numpy())
            reply = columns["logprob"][len(turn.prompt_tokens) :]
            assert turn.logprobs is not None
            np.testing.assert_array_equal(reply, turn.logprobs.astype(np.float32))
            assert columns["sampled"][: len(rollout.turns[0].prompt_tokens)].sum() == 0
            assert [span["stop"] for span in header["spans"]][-1] == len(columns["ids"])
            assert header["sample"] is None


def test_a_group_says_where_its_attempts_part(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        for attempt, reply in enumerate(("same", "same", "other")):
            with tape.rollout(task_id="task", attempt=attempt) as rollout:
                session = rollout.session()
                next_turn(session, first_turn(session, reply=assistant(reply)))
                rollout.finish(reward=float(attempt))
    with answers_for(tmp_path / "run") as answers:
        group = rolltape.read(tmp_path / "run").index()[0].head.group
        told = answers.group(group)()
        assert [one["attempt"] for one in told["rollouts"]] == [0, 1, 2]
        assert [len(one["messages"]) for one in told["rollouts"]] == [4, 4, 4]
        keys = [[message["key"] for message in one["messages"]] for one in told["rollouts"]]
        assert keys[0] == keys[1] != keys[2]


def test_a_comparison_tells_the_fates_of_every_turn_under_both_policies(tmp_path: Path) -> None:
    (rollout_id, *_) = record_run(tmp_path / "run")
    rollout = rolltape.read(tmp_path / "run").rollout(rollout_id)
    with answers_for(tmp_path / "run") as answers:
        told = answers.shown(answers.row(rollout_id, None)).compare("exact", "slime")
    assert [turn["turn"] for turn in told["turns"]] == [turn.id for turn in rollout.turns]
    for side, policy in (("left", "exact"), ("right", "slime")):
        totals = Counter[str]()
        for turn in told["turns"]:
            totals.update(turn[side])
        expected = rolltape.linearize(rollout, policy).ledger.totals()
        assert totals == {fate.value: tokens for fate, tokens in expected.items()} == told[side]["ledger"]


def test_samples_whose_spans_are_left_out_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detail, "_SAMPLES_WITH_SPANS", 1)
    with rolltape.open(tmp_path / "run", name="run") as tape:
        rollout = tape.rollout(task_id="task")
        for _ in range(2):
            first_turn(rollout.session())
        rollout.finish(reward=1.0)
    with answers_for(tmp_path / "run") as answers:
        (first, second) = answers.shown(answers.row(rollout.id, None)).compare(None, None)["left"]["samples"]
    assert [span["origin"] for span in first["spans"]] == ["prompt", "sampled"]
    assert second["spans"] is None  # the page draws it from its counts


def test_the_try_that_counts_is_shown_unless_another_is_named(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        for reward in (0.5, None):
            with tape.rollout(task_id="task", new_try=True) as rollout:
                first_turn(rollout.session())
                if reward is None:
                    rollout.fail("it broke")
                else:
                    rollout.finish(reward=reward)
    with answers_for(tmp_path / "run") as answers:
        told = answers.shown(answers.row(rollout.id, None)).detail(None)
        assert (told["row"]["try"], told["row"]["reward"], told["tries"]) == (0, 0.5, [0, 1])
        assert answers.shown(answers.row(rollout.id, "1")).detail(None)["row"]["status"] == "failed"
        assert [one["try"] for one in answers.group(told["row"]["group"])()["rollouts"]] == [0]


def test_thinking_calls_and_results_that_are_parts_of_a_message_are_told_apart(tmp_path: Path) -> None:
    said = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hmm"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "c", "name": "Read", "input": {"path": "a.py"}},
        ],
    }
    told = {"role": "user", "content": [{"type": "tool_result", "content": "no such file", "is_error": True}]}
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        next_turn(session, first_turn(session, reply=said), new_messages=[told])
        rollout.finish(reward=1.0)
    with answers_for(tmp_path / "run") as answers:
        group = answers.table({}, None)["rows"][0]["group"]
        turns = answers.shown(0).detail(None)["sessions"][0]["turns"]
        assert answers.group(group[:6])()["group"] == group
        with pytest.raises(rolltape.RolltapeError, match="holds no group"):
            answers.group("elsewhere")
    reply, [result] = turns[0]["reply"], turns[1]["new_messages"]
    assert (reply["reasoning"], reply["text"]) == ("hmm", "Let me look.")
    assert reply["tool_calls"] == [{"id": "c", "name": "Read", "arguments": {"path": "a.py"}}]
    assert (result["text"], result["is_error"]) == ("no such file", True)
