"""What is exported for another program and imported again is the same run, as far as the format carries it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings

import rolltape
from harbor_models import harbor_trajectories
from importing import imported
from rolltape.errors import ExportError
from rolltape.export import conversations_to_jsonl, conversations_to_parquet
from rolltape.export.conversations import conversations_of
from rolltape.export.formats import trajectory, write_dataset, write_inspect_log, write_trajectories
from rolltape.importers import BrokenEntry, ImportedRollout, find_rollouts
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import EventKind, Rollout, Session, SessionHead, Status
from rolltape.records.turn import Turn, TurnFlag
from rolltape.tape.recording.intake import SessionIntake
from sessions import Recording, event, rollout_of, tool, user
from strategies import rollouts, searching

searching_files = settings(searching, max_examples=searching.max_examples // 2)


def reimported(kind: str, path: Path, folder: Path) -> list[Rollout]:
    imported(kind, path, folder / "run")
    return list(rolltape.read(folder / "run").rollouts())


def recorded(found: ImportedRollout | BrokenEntry) -> Rollout:
    """What an importer found, recorded in memory: a tape of its own for each example would take minutes."""
    assert isinstance(found, ImportedRollout), found
    sessions = []
    for ordinal, session in enumerate(found.sessions):
        own = {name: value for name, value in session.settings.items() if name in SessionHead.__struct_fields__}
        shared = {name: value for name, value in session.settings.items() if name not in own}
        head = SessionHead(id=f"r.0.{ordinal}", ordinal=ordinal, **own)
        intake = SessionIntake(head, tools=session.tools, **shared)
        for fields in session.turns:
            intake.accept(intake.code(**fields))
        sessions.append(Session(intake.head, intake.turns))
    filters = [event(10, EventKind.FILTER, {"reason": found.filtered})] if found.filtered else []
    status = Status.FINISHED if found.failed is None else Status.FAILED
    return rollout_of(*sessions, reward=found.reward, status=status, events=filters)


def with_messages(turn: Turn) -> dict[str, Any]:
    """What any format with messages carries of a turn."""
    return {
        "tools": turn.root.tools or [],
        "prompt": [message.canonical_with_ids for message in turn.prompt.to_list()],
        "reply": turn.reply and turn.reply.canonical_with_ids,
    }


def with_tokens(turn: Turn) -> dict[str, Any]:
    """What a format with token ids carries of a turn."""
    facts = {name: getattr(turn.facts, name) for name in turn.facts.__struct_fields__}
    for name in ("message_starts", "unknown"):
        del facts[name]
    logprobs = None if turn.logprobs is None else np.asarray(turn.logprobs, np.float64).tobytes()
    ids = (turn.prompt_ids.tolist(), turn.sampled_ids.tolist(), logprobs)
    return {**with_messages(turn), "ids": ids, "facts": repr(facts)}


def samples_of(rollout: Rollout, policy: str) -> list[Any]:
    made = rolltape.linearize(rollout, policy, versions=["1", "2", "3", "4"])
    samples = [
        (one.ids.tolist(), one.trained_mask.tolist(), np.asarray(one.logprobs, np.float64).tobytes(), one.reward)
        for one in made.samples()
    ]
    return [*samples, made.ledger.totals()]


@searching_files
@given(rollouts())
def test_a_trajectory_gives_back_turns_ids_logprobs_facts_and_samples(drawn: tuple[Rollout, list[Recording]]) -> None:
    rollout, recordings = drawn
    # With the heads as a tape stores them, which say what the turns of a session share.
    sessions = [Session(one.intake.head, one.turns) for one in recordings]
    rollout = Rollout(rollout.head, sessions, rollout.events, writer_alive=False)
    if trajectory(rollout) is None:
        assert rollout.status is Status.LOST
        return
    with TemporaryDirectory() as folder:
        write_trajectories([rollout], folder)
        (found,) = find_rollouts("atif", folder)
        assert isinstance(found, ImportedRollout)
        back = recorded(found)
        assert [list(map(with_tokens, session.turns)) for session in back.sessions] == [
            list(map(with_tokens, session.turns)) for session in rollout.sessions
        ]
        for policy in ("exact", "keep-head", "slime"):
            assert samples_of(back, policy) == samples_of(rollout, policy)
        assert (back.status, back.reward, back.outcome.filtered) == (
            rollout.status,
            rollout.reward,
            rollout.outcome.filtered,
        )
        assert (found.task_id, found.step, found.attempt) == ("task", 3, 0)


@searching_files
@given(rollouts())
def test_conversations_give_back_turns_messages_rewards_and_what_trains(
    drawn: tuple[Rollout, list[Recording]],
) -> None:
    rollout = drawn[0]
    found = [one for one in conversations_of(rollout) if one.training]
    assume(found)
    with TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        assert conversations_to_jsonl([rollout], file) == len(found)
        (made,) = find_rollouts("messages", file)
        back = recorded(made)
        told = {turn.id: turn for one in found for turn in one.turns if turn.reply is not None}
        kept = [[turn for turn in session.turns if turn.id in told] for session in rollout.sessions]
        assert [list(map(with_replies, session.turns)) for session in back.sessions] == [
            list(map(with_replies, turns)) for turns in kept if turns
        ]
        assert (back.reward, back.status) == (rollout.reward, rollout.status)
        training = trained_ids(rollout)
        assert trained(back) == [[turn.id in training for turn in turns] for turns in kept if turns]


def trained_ids(rollout: Rollout) -> set[str]:
    """The turns whose replies train. Each does in one conversation."""
    ids = [turn.id for one in conversations_of(rollout) for turn in one.turns if turn.sequence in one.training]
    assert len(ids) == len(set(ids))
    return set(ids)


def trained(rollout: Rollout) -> list[list[bool]]:
    training = trained_ids(rollout)
    return [[turn.id in training for turn in session.turns] for session in rollout.sessions]


def with_replies(turn: Turn) -> dict[str, Any]:
    """As `with_messages`, without the ids of messages, which services for fine-tuning do not take."""
    return {
        "tools": turn.root.tools or [],
        "prompt": [message.canonical for message in turn.prompt.to_list()],
        "reply": turn.reply and turn.reply.canonical,
    }


CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"x": 1}'}}


def a_rollout(**outcome: Any) -> Rollout:
    """A rollout with tools, thinking, a branch, a sub-agent, and numbers that JSON does not have."""
    main = Recording(tools=[{"name": "run", "parameters": {"type": "object"}}])
    thinking = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    first = main.ask([user("fix it")], thinking)
    result = {**tool("1 failed"), "tool_call_id": "c1"}
    main.go_on(first, [result], "done", logprobs=[-0.5, None])
    main.go_on(first, [{**result, "content": "2 failed"}], "other")
    helper = Recording(1)
    helper.ask([user("help")], "here", weight_version=None)
    return rollout_of(main.session(), helper.session(), **outcome)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_each_form_of_conversations_gives_back_the_rollout(tmp_path: Path, form: str) -> None:
    rollout = a_rollout(reward=float("-inf"))
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        conversations_to_jsonl([rollout], path)
    elif form == "parquet":
        conversations_to_parquet([rollout], path)
    else:
        write_dataset(lambda file: conversations_to_parquet([rollout], file), str(path))
    (back,) = reimported("messages", path, tmp_path)
    assert shown(back) == shown(rollout)
    assert back.reward == float("-inf")
    assert rolltape.read(tmp_path / "run").rollout("r").id == back.id
    assert [one.training for one in conversations_of(back)] == [one.training for one in conversations_of(rollout)]


def shown(rollout: Rollout) -> Sequence[Any]:
    return [list(map(with_replies, session.turns)) for session in rollout.sessions]


def test_a_reply_on_two_branches_trains_in_the_first_alone(tmp_path: Path) -> None:
    conversations_to_jsonl([a_rollout()], tmp_path / "rows.jsonl", bare=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [[one["weight"] for one in row["messages"] if "weight" in one] for row in rows] == [[1, 1], [0, 1], [1]]
    assert [sorted(row) for row in rows] == [["messages", "tools"], ["messages", "tools"], ["messages"]]


@searching_files
@given(rollouts())
def test_harbor_reads_every_trajectory(drawn: tuple[Rollout, list[Recording]]) -> None:
    document = trajectory(drawn[0])
    assume(document is not None)
    read = harbor_trajectories().Trajectory.model_validate_json(encode_numbers(document, "trajectory"))
    steps = [step for one in (read, *(read.subagent_trajectories or ())) for step in one.steps]
    calls = [step for step in steps if step.llm_call_count == 1]
    assert len(calls) == len(drawn[0].turns)
    faithful = [turn for turn in drawn[0].turns if TurnFlag.NOT_TOKEN_FAITHFUL not in turn.facts.flags]
    assert sorted(step.metrics.completion_token_ids for step in calls if step.metrics) == sorted(
        turn.sampled_ids.tolist() for turn in faithful
    )


def test_what_does_not_train_is_left_out_and_named(tmp_path: Path) -> None:
    left_out: list[str] = []
    failed = a_rollout(status=Status.FAILED)
    assert conversations_to_jsonl([failed], tmp_path / "rows.jsonl", left_out=left_out) == 0
    assert left_out == ["r"]
    assert trajectory(a_rollout(status=None)) is None


@pytest.mark.parametrize("form", ["eval", "json"])
def test_an_inspect_log_gives_back_the_longest_conversation_with_its_reward(tmp_path: Path, form: str) -> None:
    rollout = a_rollout(reward=float("nan"))
    assert write_inspect_log([rollout], tmp_path / f"log.{form}") == 1
    (back,) = reimported("inspect", tmp_path / f"log.{form}", tmp_path)
    assert [with_replies(turn)["reply"] for turn in back.turns] == [
        with_replies(turn)["reply"] for turn in rollout.sessions[0].turns[:2]
    ]
    assert back.reward is not None
    assert math.isnan(back.reward)
    assert (back.head.step, back.head.attempt, back.head.task_id) == (3, 0, "task")
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_log_of_several_models_is_refused(tmp_path: Path) -> None:
    one = a_rollout()
    other = Rollout(
        msgspec.structs.replace(one.head, model="another", attempt=1), one.sessions, one.events, writer_alive=False
    )
    with pytest.raises(ExportError, match="a log is of one source, model and step"):
        write_inspect_log([one, other], tmp_path / "log.eval")
    assert list(tmp_path.iterdir()) == []


def test_a_filtered_rollout_is_filtered_on_the_tape_that_it_is_imported_into(tmp_path: Path) -> None:
    rollout = a_rollout(events=[event(10, EventKind.FILTER, {"reason": "a near duplicate"})])
    write_trajectories([rollout], tmp_path / "out")
    (back,) = reimported("atif", tmp_path / "out", tmp_path)
    assert (back.outcome.filtered, back.sessions[0].head.stop_ids) == ("a near duplicate", (0,))
    assert samples_of(back, "exact") == samples_of(rollout, "exact")
    assert imported("atif", tmp_path / "out", tmp_path / "run").known == 1


def test_a_trajectory_shows_thinking_under_its_other_name_and_gives_it_back(tmp_path: Path) -> None:
    main = Recording()
    main.ask([user("1 + 1?")], {"role": "assistant", "content": "2", "reasoning": "one and one"})
    rollout = rollout_of(main.session())
    document = trajectory(rollout)
    assert document is not None
    assert document["steps"][-1]["reasoning_content"] == "one and one"
    write_trajectories([rollout], tmp_path / "out")
    (back,) = reimported("atif", tmp_path / "out", tmp_path)
    assert [with_messages(turn) for turn in back.turns] == [with_messages(turn) for turn in rollout.turns]


def recorded_run(folder: Path, **head: Any) -> Path:
    """A run of one rollout whose second turn was interrupted before it had a reply."""
    with rolltape.open(folder / "odd") as tape, tape.rollout(**head) as rollout:
        session = rollout.session()
        asked, said = {"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}
        session.record_turn(
            prompt_messages=[asked],
            prompt_ids=[1],
            sampled_ids=[2],
            logprobs=[-1.0],
            reply=said,
            finish="stop",
            delivery="delivered",
        )
        session.record_turn(prompt_messages=[asked, said, asked], prompt_ids=[1, 2, 1], sampled_ids=[], finish="abort")
        session.settle()
        rollout.finish(reward=1.0)
    return folder / "odd"


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_numbers_of_a_task_that_are_not_finite_come_back(tmp_path: Path, form: str) -> None:
    run = recorded_run(tmp_path, task_id="t", task={"limit": math.inf, "text": "t"})
    write = conversations_to_jsonl if form == "jsonl" else conversations_to_parquet
    write(rolltape.read(run).rollouts(), tmp_path / f"c.{form}")
    (back,) = reimported("messages", tmp_path / f"c.{form}", tmp_path)
    assert back.head.task == {"limit": math.inf, "text": "t"}


def test_an_inspect_log_has_rollouts_that_end_without_a_reply_and_ids_with_a_nul(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, task_id="a\0b")
    left_out: list[str] = []
    assert write_inspect_log(rolltape.read(run).rollouts(), tmp_path / "log.eval", left_out) == 1
    assert left_out == []
    (back,) = reimported("inspect", tmp_path / "log.eval", tmp_path)
    assert (back.head.task_id, [turn.reply and turn.reply.text for turn in back.turns]) == ("a\0b", ["gone"])
