"""prime-rl's token exports: one line per trained sequence, joined with its traces if those are given.

Its rollout files, `rollouts/step_N/…/traces.jsonl`, are verifiers' traces: import them as `verifiers`.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import ImportFileError
from rolltape.importers.files import first_object, json_lines, of_each_file
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    each_rollout,
    token_turns,
)
from rolltape.importers.kinds import verifiers

_PER_TOKEN = ("token_ids", "loss_mask", "inference_logprobs")


def recognize(path: Path) -> str | None:
    """Rows with `token_ids`, `loss_mask` and `inference_logprobs`."""
    file = next(iter(sorted(path.rglob("rank_*.jsonl"))), None) if path.is_dir() else path
    row = first_object(file) if file is not None and file.suffix == ".jsonl" else None
    return "rows with token_ids, loss_mask, and inference_logprobs" if row and row.keys() >= set(_PER_TOKEN) else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per sequence. If a trace holds the sequence, the rollout has its messages, task, and reward."""
    traces = {} if options.traces is None else _sequences_of(Path(options.traces), options)
    rows = of_each_file(path, ".jsonl", read=json_lines)
    yield from each_rollout(rows, partial(_rollout, traces=traces, options=options))


def _rollout(
    row: Mapping[str, Any], where: str, traces: Mapping[tuple[int, ...], ImportedRollout], options: ImportOptions
) -> ImportedRollout:
    # A trainer that serves several runs counts its own steps in `step`.
    step = options.step if options.step is not None else row.get("export_step", row["step"])
    place = "-".join(str(row.get(name, 0)) for name in ("step", "rank", "export_sequence_idx"))
    advantage = next(
        (value for value, trained in zip(row["advantages"], row["loss_mask"], strict=True) if trained), None
    )
    extra = {"advantage": advantage, "env_name": row.get("env_name")}
    found = traces.get(tuple(row["token_ids"]))
    if found is not None:
        return msgspec.structs.replace(
            found,
            where=where,
            key=None,
            step=int(step),
            foreign_ids=(*found.foreign_ids, f"prime-rl-{place}"),
            extra={**found.extra, **extra},
        )
    turns = token_turns(row["token_ids"], row["loss_mask"], where=where, logprobs=row["inference_logprobs"])
    return ImportedRollout(
        where=where,
        sessions=[ImportedSession(turns=turns, tokenizer=options.tokenizer)],
        foreign_ids=(f"prime-rl-{place}",),
        task={"prompt_ids": turns[0]["prompt_ids"]},
        **options.origin(source=row.get("env_name"), step=int(step)),
        extra=extra,
        absent=("messages", "rewards", "weight versions"),
    )


def _sequences_of(path: Path, options: ImportOptions) -> dict[tuple[int, ...], ImportedRollout]:
    """The rollouts of traces by the ids of each branch, each with only the session of that branch."""
    found: dict[tuple[int, ...], ImportedRollout] = {}
    for item in verifiers.find(path, options):
        if isinstance(item, BrokenEntry):
            raise ImportFileError(f"{item.where}: {item.problem}")
        for session in item.sessions:
            branches = [
                ((*turn["prompt_ids"], *turn["sampled_ids"]), turn) for turn in session.turns if "sampled_ids" in turn
            ]
            for ids, _ in branches:
                chain = [turn for before, turn in branches if ids[: len(before)] == before]
                alone = msgspec.structs.replace(session, turns=chain)
                found[ids] = msgspec.structs.replace(item, sessions=[alone])
    return found
