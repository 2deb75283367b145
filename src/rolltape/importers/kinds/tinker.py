"""tinker-cookbook's rollouts: its capture database, with ids and logprobs, and its rollout summaries, without them."""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rolltape.errors import ImportFileError
from rolltape.importers.files import first_file, first_object, json_lines, of_each_file
from rolltape.importers.imported import Found, ImportedRollout, ImportedSession, ImportOptions, each_rollout, or_broken

_DATABASES = (".db", ".sqlite", ".sqlite3")
_LISTS = ("prompt_tokens", "sampled_tokens", "logprobs")


def recognize(path: Path) -> str | None:
    """A database with `wire_rows`, or rows with `traj_idx` and `steps`."""
    if path.is_dir():
        file = min(path.rglob("*_rollout_summaries.jsonl"), default=None) or first_file(path, *_DATABASES)
        return recognize(file) if file is not None else None
    if path.suffix in _DATABASES:
        return "a capture database" if "wire_rows" in _tables(path) else None
    row = first_object(path) if path.suffix == ".jsonl" else None
    return "rollout summaries" if row and {"traj_idx", "steps", "total_reward"} <= row.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per trajectory."""
    return of_each_file(path, ".jsonl", *_DATABASES, read=partial(_file_rollouts, options=options))


def _file_rollouts(file: Path, options: ImportOptions) -> Found:
    if file.suffix in _DATABASES:
        yield from _captured(file, options)
        return
    yield from each_rollout(json_lines(file), partial(_summary, options=options))


def _summary(row: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedRollout:
    """A summary has the length and reward of each step, but no messages."""
    turns = [
        {
            "prompt_messages": [],
            "finish": "stop",
            "token_faithful": False,
            "reward": step["reward"],
            "extra": {name: step[name] for name in ("ob_len", "ac_len", "metrics", "logs") if step.get(name)},
        }
        for step in row["steps"]
    ]
    version = row.get("sampling_client_step")
    return ImportedRollout(
        where=where,
        sessions=[ImportedSession(turns=turns)],
        foreign_ids=(f"{row['split']}-{row['iteration']}-{row['group_idx']}-{row['traj_idx']}",),
        task_id=f"group {row['group_idx']}",
        **options.origin(split=row["split"], step=row["iteration"]),
        attempt=row["traj_idx"],
        tags=tuple(row.get("tags") or ()),
        extra={"trajectory_metrics": row.get("trajectory_metrics"), "sampling_client_step": version},
        reward=row["total_reward"],
        reward_terms={"final_reward": row["final_reward"]} if row.get("final_reward") is not None else {},
        absent=("messages", "token ids", "logprobs"),
    )


def _captured(file: Path, options: ImportOptions) -> Found:
    rollouts: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in _rows(file):
        place = tuple(
            row.get(name) for name in ("run_id", "run_attempt", "split", "iteration", "group_idx", "traj_idx")
        )
        # A sample without a trajectory is a separate rollout.
        rollouts.setdefault(place if place[-1] is not None else (*place, row["cursor"]), []).append(row)
    for rows in rollouts.values():
        where = f"{file}, row {rows[0]['cursor']}"
        yield or_broken(where, partial(_captured_rollout, rows, where, options))


def _captured_rollout(rows: list[dict[str, Any]], where: str, options: ImportOptions) -> ImportedRollout:
    first = rows[0]
    turns = []
    for row in rows:
        sampled, logprobs = row["sampled_tokens"], row["logprobs"]
        if row["prompt_tokens"] is None or sampled is None:
            raise ImportFileError(f"{where}: a row of it lacks prompt_tokens or sampled_tokens")
        turns.append(
            {
                "prompt_messages": [],
                "prompt_ids": row["prompt_tokens"],
                "sampled_ids": sampled,
                "logprobs": [None] * len(sampled) if logprobs is None else logprobs,
                "weight_version": row["policy_version"],
                "finish": "stop",
                "ended_at": row["created_at"],
                "extra": {"purpose": row["purpose"]} if row["purpose"] else None,
            }
        )
    names = ("run_id", "split", "iteration", "group_idx", "traj_idx")
    return ImportedRollout(
        where=where,
        sessions=[ImportedSession(turns=turns, tokenizer=options.tokenizer)],
        foreign_ids=("-".join(str(first[name]) for name in names if first[name] is not None),),
        task_id=None if first["group_idx"] is None else f"group {first['group_idx']}",
        task=None if first["group_idx"] is not None else {"prompt_ids": first["prompt_tokens"]},
        **options.origin(source=first["run_id"], split=first["split"], step=first["iteration"]),
        attempt=first["traj_idx"],
        extra={"metadata": first["metadata"]} if first["metadata"] else {},
        absent=("messages", "rewards", *(() if first["policy_version"] is not None else ("weight versions",))),
    )


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    connection = _connect(file)
    try:
        connection.row_factory = sqlite3.Row
        for stored in connection.execute("SELECT * FROM wire_rows ORDER BY cursor"):
            row = dict(stored)
            for name in (*_LISTS, "metadata"):
                row[name] = None if row.get(name) is None else json.loads(row[name])
            yield row
    except (sqlite3.Error, ValueError, RecursionError) as error:
        raise ImportFileError(f"{file}: not a capture database: {error}") from None
    finally:
        connection.close()


def _connect(file: Path) -> sqlite3.Connection:
    """A read-only connection. The cookbook's databases have a log beside them, which SQLite may have to make."""
    log = file.with_name(f"{file.name}-wal")
    has_log = log.exists() and log.stat().st_size > 0
    options = "mode=ro" if has_log or os.access(file.parent, os.W_OK) else "mode=ro&immutable=1"
    return sqlite3.connect(f"file:{quote(str(file))}?{options}", uri=True)


def _tables(file: Path) -> set[str]:
    try:
        connection = _connect(file)
        try:
            return {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        finally:
            connection.close()
    except sqlite3.Error:
        return set()
