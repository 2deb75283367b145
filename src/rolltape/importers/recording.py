"""Records what an importer found: each rollout once, however often it is imported."""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from rolltape.errors import ImportFileError, NotJsonError, RecordError
from rolltape.importers.imported import BrokenEntry, ImportedRollout, ImportedSession
from rolltape.records.ids import group_id, join_source
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import Status
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tape.recording.tape import Tape
from rolltape.tape.run import read
from rolltape.tape.rundir import locked

_NOT_WHOLE = "not imported whole: "


class ImportReport(msgspec.Struct):
    """The counts of an import, and its broken entries."""

    imported: int = 0
    known: int = 0  # on the tape already
    broken: list[BrokenEntry] = []
    absent: dict[str, int] = {}  # how many imported rollouts lack each kind of data

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        broken = [{"where": entry.where, "problem": entry.problem} for entry in self.broken]
        return {"imported": self.imported, "known": self.known, "broken": broken, "absent": self.absent}


class _KnownRollouts:
    """The rollouts of earlier imports in a run, and which attempts of its groups are taken."""

    def __init__(self, tape: Tape) -> None:
        self.whole: set[str] = set()
        self.cut_short: dict[str, int] = {}  # by import key, the attempt of a rollout that an import left unfinished
        self.taken: dict[str, set[int]] = {}
        for row in read(tape.directory.path).index():
            self.taken.setdefault(row.group, set()).add(row.attempt)
            key = row.head.extra.get("imported", {}).get("key")
            if key is None:
                continue
            ended = row.status in (Status.FINISHED, Status.FAILED) and not (row.reason or "").startswith(_NOT_WHOLE)
            if ended:
                self.whole.add(key)
            else:
                self.cut_short[key] = row.attempt

    def attempt(self, group: str, key: str, wanted: int | None) -> int:
        """The attempt number to record under. A rollout that was left unfinished keeps its number."""
        taken = self.taken.setdefault(group, set())
        if key in self.cut_short:
            return self.cut_short[key]
        attempt = wanted
        if attempt is None or attempt in taken:
            attempt = max(taken, default=-1) + 1
        taken.add(attempt)
        return attempt


def record_imported(
    tape: Tape,
    kind: str,
    found: Iterable[ImportedRollout | BrokenEntry],
    *,
    skip_broken: bool = False,
    progress: Callable[[ImportReport], None] = lambda report: None,
) -> ImportReport:
    """Record rollouts of another program in a run. Rollouts that the run has already are left as they are.

    Without `skip_broken`, the first entry that cannot be read raises. Earlier entries are recorded, and another import
    continues from there.
    """
    # Another import into the run waits, because neither would see what the other records.
    with locked(tape.directory.path, "import.lock", for_long=True):
        return _record_all(tape, kind, found, skip_broken, progress)


def _record_all(
    tape: Tape,
    kind: str,
    found: Iterable[ImportedRollout | BrokenEntry],
    skip_broken: bool,
    progress: Callable[[ImportReport], None],
) -> ImportReport:
    report, known, seen = ImportReport(), _KnownRollouts(tape), Counter[str]()
    for item in found:
        if isinstance(item, BrokenEntry):
            _note_broken(report, item, skip_broken)
            continue
        key = _key_of(item)
        if isinstance(key, BrokenEntry):
            _note_broken(report, key, skip_broken)
            continue
        seen[key] += 1
        if seen[key] > 1:
            if item.key:
                _note_broken(report, BrokenEntry(item.where, f"the id {item.key} appears twice in it"), skip_broken)
                continue
            key = f"{key}.{seen[key]}"
        if key in known.whole:
            report.known += 1
        else:
            try:
                _record(tape, kind, item, key, known)
                report.imported += 1
                for what in item.absent:
                    report.absent[what] = report.absent.get(what, 0) + 1
            except RecordError as error:
                _note_broken(report, BrokenEntry(item.where, str(error)), skip_broken)
        progress(report)
    return report


def refuse_broken(item: ImportedRollout | BrokenEntry) -> None:
    """Raise ImportFileError for an entry that no import without `skip_broken` can begin with."""
    key = item if isinstance(item, BrokenEntry) else _key_of(item)
    if isinstance(key, BrokenEntry):
        _note_broken(ImportReport(), key, skip=False)


def _key_of(item: ImportedRollout) -> str | BrokenEntry:
    """The key that tells a rollout from others of the source, or what is wrong with the entry."""
    try:
        msgspec.convert(msgspec.structs.asdict(item), ImportedRollout)
        return item.key or _digest(item)
    except (msgspec.ValidationError, RecordError) as error:
        return BrokenEntry(item.where, f"it cannot be a rollout: {error}")


def _note_broken(report: ImportReport, entry: BrokenEntry, skip: bool) -> None:
    if not skip:
        raise ImportFileError(
            f"{entry.where}: {entry.problem}; {report.imported} rollouts before it were imported. Correct it and "
            "import again, or skip what is broken with --skip-broken"
        )
    report.broken.append(entry)


def _record(tape: Tape, kind: str, item: ImportedRollout, key: str, known: _KnownRollouts) -> None:
    identity: dict[str, Any] = {"task_id": item.task_id, "model": item.model, "agent": item.agent}
    joined = join_source(item.source, item.split)
    try:
        group = group_id(tape.name, **identity, source=joined, task=item.task, step=item.step)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJsonError(f"its task identifies it, but has no canonical JSON: {error}") from None
    attempt = known.attempt(group, key, item.attempt)
    terms = item.reward_terms
    extra = {**item.extra, "imported": {"kind": kind, "key": key, "absent": list(item.absent)}}
    if terms and (item.reward is None or item.failed is not None):
        extra["reward_terms"], terms = terms, {}  # no score can have them
    recorder = tape.rollout(
        **identity,
        source=item.source,
        split=item.split,
        task=item.task,
        step=item.step,
        attempt=attempt,
        tags=item.tags,
        foreign_ids=item.foreign_ids,
        extra=extra,
        new_try=key in known.cut_short,
    )
    try:
        for session in item.sessions:
            _record_session(recorder, session)
        if item.failed is not None:
            recorder.fail(item.failed)
        else:
            recorder.finish(reward=item.reward, reward_terms=terms, stop_reason=item.stop_reason, reason=item.reason)
        if item.filtered is not None:
            tape.filter(recorder.id, item.filtered, try_index=recorder.try_index)
    except RecordError as error:
        recorder.fail(f"{_NOT_WHOLE}{error}")
        raise


def _record_session(recorder: RolloutRecorder, session: ImportedSession) -> None:
    recording: SessionRecorder = recorder.session(
        tools=session.tools, tokenizer=session.tokenizer, extra=session.extra, **session.settings
    )
    last = None
    for fields in session.turns:
        continues = "new_messages" in fields or "new_prompt_ids" in fields
        last = recording.record_turn(after=last if continues else None, **fields)


def _digest(item: ImportedRollout) -> str:
    # Its place in the source does not count: the same content in a file of another name is the same rollout.
    content = msgspec.structs.replace(item, where="")
    try:
        raw = msgspec.msgpack.encode(content, enc_hook=str)
    except (OverflowError, UnicodeEncodeError, RecursionError):
        raw = encode_numbers(msgspec.to_builtins(content, enc_hook=str), item.where)
    return blake2b(raw, digest_size=16).hexdigest()
