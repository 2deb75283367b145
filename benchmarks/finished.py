"""A run of many finished rollouts as `rolltape collect` leaves it, made without asking anybody."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rolltape.collect.plan import Identity
from rolltape.collect.settings import CollectSettings
from rolltape.collect.sources import Source, open_source
from rolltape.collect.tasks import Task
from rolltape.records.ids import group_id, session_id, turn_id
from rolltape.records.openfields import encode_record
from rolltape.records.rollout import EventKind, RolloutHead, SessionHead, Status
from rolltape.tape.index.standing import packed
from rolltape.tape.journal.entries import (
    EndedRollout,
    LoggedEvent,
    RecordedTurn,
    StartedRollout,
    StartedSession,
    event_body,
    facts_json,
)
from rolltape.tape.journal.writing import Journal
from rolltape.tape.recording.intake import CodedTurn, SessionIntake
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.shards.places import Place
from rolltape.tape.shards.seal import shard_id
from rolltape.tape.shards.writing import ShardWriter
from rolltape.tape.stored import HeldRollout, StoredSession, StoredTurn, decoded_event

_MODEL, _AGENT = "instant", "chat"
_ROLLOUTS_A_COMMIT = 500


def task_file(path: Path, tasks: int) -> Path:
    """Tasks of the `problem` kind, each with some text of its own."""
    with path.open("w") as file:
        for number in range(tasks):
            prompt = f"There are {number} boats, and one more comes. How many are there? " + "Think it over. " * 20
            file.write(json.dumps({"id": f"task-{number}", "prompt": prompt, "answer": number + 1}) + "\n")
    return path


class Finished(NamedTuple):
    """A rollout with one turn, and what was said of it: a delivery, two of a trace, the finish, the score."""

    head: RolloutHead
    session: SessionHead
    coded: CodedTurn
    events: list[LoggedEvent]

    @property
    def facts(self) -> bytes:
        return facts_json(self.coded.turn.facts, self.session.id)


def make_finished(run: Path, settings: CollectSettings) -> int:
    """Make the run in which every attempt of these settings has finished, in a journal; how many rollouts that are."""
    directory = RunDirectory.made_or_opened(run, None)
    count = 0
    with contextlib.closing(Journal(directory)) as journal, open_source(settings.source) as source:
        journal.append(_collect_event(settings, source))
        for count, one in enumerate(_rollouts(directory.name, source, settings), 1):
            *others, finish, score = one.events
            journal.submit(StartedRollout(count, one.head), StartedSession(count, count, one.session))
            journal.submit(RecordedTurn(count, one.coded, one.facts), *others)
            standing = packed(one.head, Status.FINISHED, rewarded=True, row=count)
            journal.submit(EndedRollout(count, standing, finish, score))
            if count % _ROLLOUTS_A_COMMIT == 0:
                journal.flush()
    return count


def make_sealed(run: Path, settings: CollectSettings) -> int:
    """The same in one shard."""
    directory = RunDirectory.made_or_opened(run, None)
    count = 0
    with ShardWriter(Place(run), shard_id()) as writer, open_source(settings.source) as source:
        said = [_collect_event(settings, source)]
        for one in _rollouts(directory.name, source, settings):
            count += 1
            said += one.events
            writer.add_rollout(_held(one), [StoredSession(encode_record(one.session, ""), 0, [_stored(one)])])
        writer.add_events(decoded_event("made", number, event.body) for number, event in enumerate(said))
        writer.commit()
    return count


def _rollouts(run: str, source: Source, settings: CollectSettings) -> Iterator[Finished]:
    identity = Identity(run, settings.step, _MODEL, _AGENT)
    for task in source:
        coded = SessionIntake(SessionHead(id="", ordinal=0)).code(**_turn(task))
        for attempt in range(settings.group_size):
            yield _finished(identity, task, attempt, coded)


def _finished(identity: Identity, task: Task, attempt: int, coded: CodedTurn) -> Finished:
    own: dict[str, Any] = {"source": task.source, "task_id": task.id, "task": task.data, "step": identity.step}
    by: dict[str, Any] = {"model": identity.model, "agent": identity.agent}
    head = RolloutHead(
        id=identity.of(task, attempt),
        try_index=0,
        group=group_id(identity.run, **own, **by),
        run=identity.run,
        attempt=attempt,
        **own,
        **by,
        started_at_ns=time.time_ns(),
    )
    session = session_id(*head.key, 0)
    turn = turn_id(session, 0)
    seen = {"check": "number", "wanted": 1.0, "seen": 42.0, "right": False}
    finish: dict[str, Any] = {"status": "finished", "stop_reason": "completed", "reason": None}
    events = [
        _event(EventKind.DELIVERY, head, {"delivery": "delivered"}, turn),
        _event(EventKind.TRACE, head, {"step": 0, "turns": [turn], "done": True, "stop_reason": "completed"}),
        _event(EventKind.TRACE, head, {"step": None, "reward": 0.0, "reward_data": seen}),
        _event(EventKind.FINISH, head, {**finish, "turns": [1], "sampled_tokens": 3, "versions": ["1"]}),
        _event(EventKind.SCORE, head, {"reward": 0.0, "terms": {}}),
    ]
    return Finished(head, SessionHead(id=session, ordinal=0), coded, events)


def _turn(task: Task) -> dict[str, Any]:
    return {
        "prompt_messages": [{"role": "user", "content": task.data["prompt"]}],
        "prompt_ids": list(range(100)),
        "sampled_ids": [19, 17, 4089],
        "logprobs": [-0.125, -0.25, -0.5],
        "reply": {"role": "assistant", "content": "42"},
        "finish": "stop",
        "weight_version": "1",
    }


def _held(one: Finished) -> HeldRollout:
    return HeldRollout(
        head=one.head,
        raw_head=encode_record(one.head, ""),
        writer="made",
        status=Status.FINISHED,
        rewarded=True,
        turns=(1,),
        sampled_tokens=3,
        versions=("1",),
    )


def _stored(one: Finished) -> StoredTurn:
    turn = one.coded.turn
    return StoredTurn(
        sequence=0,
        parent=None,
        keep_tokens=0,
        keep_messages=0,
        root=turn.root,
        messages=tuple(turn.prompt.own),
        reply=turn.reply,
        new_ids=turn.prompt_tokens.own,
        sampled_ids=turn.sampled_ids,
        logprobs=turn.logprobs,
        facts=one.facts,
        side={},
    )


def _collect_event(settings: CollectSettings, source: Source) -> LoggedEvent:
    data = {"settings": settings.to_be_kept(source.name), "model": _MODEL}
    return LoggedEvent(event_body(time.time_ns(), EventKind.COLLECT.value, None, None, None, None, data), remark=True)


def _event(kind: EventKind, head: RolloutHead, data: dict[str, Any], turn: str | None = None) -> LoggedEvent:
    return LoggedEvent(event_body(time.time_ns(), kind.value, *head.key, turn, None, data))
