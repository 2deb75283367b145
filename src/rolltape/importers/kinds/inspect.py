"""Inspect's logs (`.eval` and `.json`), by Inspect's own reader. A sample of an epoch is a rollout."""

import json
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rolltape.errors import ImportFileError
from rolltape.importers.files import files_of, first_object
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    conversation_turns,
    or_broken,
)
from rolltape.importers.text_dumps import ABSENT_FROM_TEXT
from rolltape.records.rollout import StopReason

_STOPS = {
    "message": StopReason.MAX_TURNS,
    "turn": StopReason.MAX_TURNS,
    "token": StopReason.MAX_TOKENS,
    "time": StopReason.TIMEOUT,
    "context": StopReason.CONTEXT_OVERFLOW,
}


def recognize(path: Path) -> str | None:
    """Files that end in .eval, and JSON with `eval` and `samples`."""
    file = next(iter(sorted(path.glob("*.eval"))), None) if path.is_dir() else path
    if file is None:
        return None
    if file.suffix == ".eval":
        return "an Inspect log"
    document = first_object(file) if file.suffix == ".json" else None
    return "an Inspect log" if document and {"eval", "samples"} <= document.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per sample and epoch."""
    try:
        reading = import_module("inspect_ai.log")
        value_to_float = import_module("inspect_ai.scorer").value_to_float()
    except ImportError:
        raise ImportFileError(f"{path}: an Inspect log; install its reader with pip install inspect-ai") from None
    for file in files_of(path, ".eval", ".json"):
        try:
            header = reading.read_eval_log(str(file), header_only=True)
            # Sample by sample where the log lists them; one that was written by hand may not.
            samples = (
                reading.read_eval_log_samples(str(file), all_samples_required=False)
                if header.eval.dataset.sample_ids
                else reading.read_eval_log(str(file)).samples or ()
            )
        except (OSError, ValueError, KeyError) as error:
            yield BrokenEntry(file.name, f"Inspect cannot read it: {error}")
            continue
        for sample in samples:
            where = f"{file.name}, sample {sample.id}, epoch {sample.epoch}"
            yield or_broken(where, partial(_rollout, sample, header.eval, where, value_to_float, options))


def _rollout(sample: Any, about: Any, where: str, value_to_float: Any, options: ImportOptions) -> ImportedRollout:
    messages = [_message(one.model_dump(mode="json", exclude_none=True)) for one in sample.messages]
    failed = sample.error.message if sample.error is not None else None
    turns: list[dict[str, Any]] = []
    rest: list[Any] = messages
    if failed is None or any(message["role"] == "assistant" for message in messages):
        turns, rest = conversation_turns(messages, where)
    scores = {name: float(value_to_float(score.value)) for name, score in (sample.scores or {}).items()}
    extra: dict[str, Any] = {"metadata": sample.metadata, "eval": about.eval_id}
    if rest:
        extra["messages_after_the_last_reply"] = rest
    limit = sample.limit.type if sample.limit is not None else None
    return ImportedRollout(
        where=where,
        sessions=[ImportedSession(turns=turns)],
        key=sample.uuid,
        foreign_ids=() if sample.uuid is None else (sample.uuid,),
        task_id=str(sample.id),
        task={"input": _input(sample.input), "target": sample.target},
        source=options.source or about.task,
        split=options.split,
        step=options.step or 0,
        attempt=sample.epoch - 1,
        model=options.model or about.model,
        extra=extra,
        # Inspect has no total. One score is the reward; of several, none is more so than another.
        reward=next(iter(scores.values())) if len(scores) == 1 and failed is None else None,
        reward_terms=scores,
        stop_reason=_STOPS.get(str(limit), StopReason.COMPLETED),
        reason=None if limit is None else f"{limit} limit",
        failed=failed,
        absent=ABSENT_FROM_TEXT,
    )


def _input(value: Any) -> Any:
    return (
        value if isinstance(value, str) else [_message(one.model_dump(mode="json", exclude_none=True)) for one in value]
    )


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message of Inspect's as a chat message."""
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
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"], "arguments": json.dumps(call["arguments"])},
            }
            for call in calls
        ]
    return message
