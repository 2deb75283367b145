"""Inspect's logs (`.eval` and `.json`), by Inspect's own reader. A sample of an epoch is a rollout."""

import json
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rolltape.extras import import_extra
from rolltape.importers.files import files_of, first_file, first_object
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    conversation_turns,
    function_call,
    or_broken,
    restored,
)
from rolltape.importers.text_dumps import ABSENT_FROM_TEXT
from rolltape.records.jsonable import decode_numbers
from rolltape.records.rollout import StopReason

_STOPS = {
    "message": StopReason.MAX_TURNS,
    "turn": StopReason.MAX_TURNS,
    "token": StopReason.MAX_TOKENS,
    "time": StopReason.TIMEOUT,
    "context": StopReason.CONTEXT_OVERFLOW,
}
# Errors of Inspect's reader for a file that is cut short or was not written by Inspect.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, EOFError),
    *(zipfile.BadZipFile, zlib.error),
)
_LARGE = 64 << 20
_MOST_SHRUNK = 250


def recognize(path: Path) -> str | None:
    """Files that end in .eval, and JSON with `eval` and `samples`."""
    file = first_file(path, ".eval") or first_file(path, ".json")
    if file is None:
        return None
    if file.suffix == ".eval":
        return "an Inspect log"
    document = first_object(file) if file.suffix == ".json" else None
    return "an Inspect log" if document and {"eval", "samples"} <= document.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per sample and epoch."""
    reading = import_extra("inspect_ai.log", "inspect")
    value_to_float = import_extra("inspect_ai.scorer", "inspect").value_to_float()
    for file in files_of(path, ".eval", ".json"):
        try:
            yield from _file_rollouts(file, reading, value_to_float, options)
        except _UNREADABLE as error:
            yield BrokenEntry(str(file), f"Inspect cannot read it: {error}")


def _file_rollouts(file: Path, reading: Any, value_to_float: Any, options: ImportOptions) -> Found:
    if (bomb := _bomb_in(file)) is not None:
        yield BrokenEntry(str(file), bomb)
        return
    header = reading.read_eval_log(str(file), header_only=True)
    # Sample by sample, if the log lists its samples. A log that was written by hand may not.
    samples = (
        reading.read_eval_log_samples(str(file), all_samples_required=False)
        if header.eval.dataset.sample_ids
        else reading.read_eval_log(str(file)).samples or ()
    )
    for sample in samples:
        where = f"{file}, sample {sample.id}, epoch {sample.epoch}"
        yield or_broken(where, partial(_rollout, sample, header.eval, where, value_to_float, options))


def _bomb_in(file: Path) -> str | None:
    """The problem if an entry of a log would unpack to far more than its size, or None. Texts shrink to about 1/10."""
    if file.suffix != ".eval":
        return None
    with zipfile.ZipFile(file) as log:
        for entry in log.infolist():
            if entry.file_size > _LARGE and entry.file_size > _MOST_SHRUNK * entry.compress_size:
                return f"it unpacks to {entry.file_size:,} bytes in {entry.filename}, far too many times its size"
    return None


def _rollout(sample: Any, about: Any, where: str, value_to_float: Any, options: ImportOptions) -> ImportedRollout:
    messages = [_message(one) for one in sample.messages]
    own = decode_numbers(json.dumps((sample.metadata or {}).get("rolltape") or {}).encode())
    failed = sample.error.message if sample.error is not None else None
    turns, rest = conversation_turns(messages, where, may_be_empty=failed is not None)
    asked = sample.input
    limit = sample.limit.type if sample.limit is not None else None
    made = ImportedRollout(
        where=where,
        sessions=[ImportedSession(turns=turns)],
        key=sample.uuid,
        foreign_ids=() if sample.uuid is None else (sample.uuid,),
        task_id=str(sample.id),
        task={"input": asked if isinstance(asked, str) else list(map(_message, asked)), "target": sample.target},
        **options.origin(source=about.task, model=about.model),
        attempt=sample.epoch - 1,
        stop_reason=_STOPS.get(str(limit), StopReason.COMPLETED),
        reason=None if limit is None else f"{limit} limit",
        failed=failed,
        absent=ABSENT_FROM_TEXT,
    )
    if "rollout" in own:
        # The original turns, also if a prompt held replies.
        turns = [
            {"prompt_messages": messages[:at], "reply": messages[at], "finish": "stop", "token_faithful": False}
            for at in own["replies"]
        ]
        return restored(msgspec.structs.replace(made, sessions=[ImportedSession(turns=turns)]), own, options)
    scores = {name: float(value_to_float(score.value)) for name, score in (sample.scores or {}).items()}
    extra = {"metadata": sample.metadata, "eval": about.eval_id, **rest}
    # Inspect has no total. A single score is the reward. With several scores, none of them is.
    reward = next(iter(scores.values())) if len(scores) == 1 and failed is None else None
    return msgspec.structs.replace(made, extra=extra, reward=reward, reward_terms=scores)


def _message(own: Any) -> dict[str, Any]:
    """An Inspect message as a chat message."""
    given = own.model_dump(mode="json", exclude_none=True)
    content, reasoning = given.get("content", ""), ""
    if isinstance(content, list):
        reasoning = "".join(part.get("reasoning", "") for part in content if part.get("type") == "reasoning")
        content = [part for part in content if part.get("type") != "reasoning"]
        if all(part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
    message: dict[str, Any] = {"role": given["role"], "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if given["role"] == "tool" and given.get("tool_call_id"):
        message["tool_call_id"] = given["tool_call_id"]
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [function_call(call["id"], call["function"], call["arguments"]) for call in calls]
    return message
