"""Token records ↔ JSON lines in prime-rl's schema, version 1, so that scripts written for it go on working.

What it has no field for (sample, rollout, weight versions, …) comes after its own fields.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import DamagedTapeError, RecordError
from rolltape.records.token_record import FLAG_COLUMNS, ID_COLUMNS, NEEDED_COLUMNS, TokenRecord
from rolltape.tokens.sequences import Sequences

_SCHEMA_VERSION = 1
_FIELDS = {
    "token_ids": "ids",
    "position_ids": "position_ids",
    "loss_mask": "trained_mask",
    "advantages": "advantages",
    "rewards": "rewards",
    "inference_logprobs": "inference_logprobs",
    "trainer_logprobs": "trainer_logprobs",
    "entropy": "entropy",
    "mismatch_kl": "mismatch_kl",
    "log_importance_ratio": "log_ratio",
    "importance_ratio": "ratio",
    "prob_delta": "prob_delta",
    "is_masked": "masked",
    "is_masked_high": "masked_high",
    "is_masked_low": "masked_low",
    "rl_weights": "rl_weights",
    "ce_weights": "ce_weights",
    "ref_kl_weights": "ref_kl_weights",
}
# Ours beside prime-rl's.
_OWN_FACTS = {
    "sample_id": "sample",
    "rollout_id": "rollout",
    "group_id": "group",
    "weight_versions": "versions",
    "reward": "reward",
}
_OWN_FIELDS = {"old_logprobs": "old_logprobs", "ref_logprobs": "reference_logprobs"}

_NEEDED = {field: name for field, name in _FIELDS.items() if name in NEEDED_COLUMNS}
_OPTIONAL = {field: name for field, name in (_FIELDS | _OWN_FIELDS).items() if name not in NEEDED_COLUMNS}

_encode = msgspec.json.Encoder().encode  # numbers that are not finite become null


def write_lines(path: Path, step: int, rank: int, first: int, held: Sequence[Sequences]) -> None:
    """Write the records of a step and rank, the first of which is its `first`."""
    with path.open("wb") as out:
        for sequences in held:
            ends = sequences.lengths.cumsum().tolist()
            for place, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
                out.write(_encode(_line(step, rank, first + place, sequences, place, start, stop)) + b"\n")
            first += len(sequences)


def _line(step: int, rank: int, number: int, held: Sequences, place: int, start: int, stop: int) -> dict[str, Any]:
    facts = {name: values[place] for name, values in held.facts.items()}
    absent = [None] * (stop - start)
    columns = {name: values[start:stop].tolist() for name, values in held.columns.items()}
    if "rewards" not in columns and "reward" in facts:
        columns["rewards"] = [facts["reward"]] * (stop - start)
    return {
        "schema_version": _SCHEMA_VERSION,
        "step": step,
        "export_step": step,
        "rank": rank,
        "micro_step": facts["micro_step"],
        "micro_sequence_idx": facts["micro_sequence"],
        "export_sequence_idx": number,
        "run_id": None,
        "env_name": facts.get("env"),
        **{field: columns.get(name, absent) for field, name in _FIELDS.items()},
        **{field: facts.get(name) for field, name in _OWN_FACTS.items()},
        **{field: columns[name] for field, name in _OWN_FIELDS.items() if name in columns},
        "loss": facts["loss"],
    }


def read_lines(path: Path) -> Iterator[TokenRecord]:
    """The records of a file, also of one that prime-rl wrote; a null among numbers is NaN."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield _record(line, f"{path}, line {number}")
    except OSError as error:
        raise DamagedTapeError(f"{path}: cannot be read: {error.strerror or error}") from None


def _record(line: bytes, where: str) -> TokenRecord:
    try:
        row = json.loads(line)
        columns = {name: _array(name, row.get(field)) for field, name in _OPTIONAL.items()}
        columns |= {name: _numbers(name, row[field]) for field, name in _NEEDED.items()}
        return TokenRecord(
            step=row.get("export_step", row["step"]),  # of the run; a trainer of several counts its own besides
            rank=row["rank"],
            micro_step=row["micro_step"],
            micro_sequence=row["micro_sequence_idx"],
            sequence=row["export_sequence_idx"],
            env=row["env_name"],
            loss=row.get("loss"),
            sample=row.get("sample_id"),
            rollout=row.get("rollout_id"),
            group=row.get("group_id"),
            reward=row.get("reward"),
            versions=tuple(row.get("weight_versions") or ()),
            **columns,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecordError) as error:
        raise DamagedTapeError(f"{where}: no token record: {error!r}") from None


def _array(name: str, values: list[Any] | None) -> Any:
    if values is None or (values and all(value is None for value in values)):
        return None
    return _numbers(name, values)


def _numbers(name: str, values: list[Any]) -> Any:
    if name in FLAG_COLUMNS:
        return np.array(values, np.bool_)
    return np.array(values, np.int32 if name in ID_COLUMNS else np.float32)
