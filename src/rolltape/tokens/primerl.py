"""Reads and writes token records as JSON lines in prime-rl's schema, version 1, so that its scripts still work.

Fields that prime-rl does not have (sample, rollout, weight versions, …) follow its own.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import DamagedTapeError, RecordError
from rolltape.records.token_record import TOKEN_COLUMNS, TokenRecord
from rolltape.tape.rundir import open_private
from rolltape.tokens.sequences import Sequences

_SCHEMA_VERSION = 1
# prime-rl's fields in its order, and the names of their columns here.
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
_OWN_FIELDS = {"old_logprobs": "old_logprobs", "ref_logprobs": "reference_logprobs"}  # written where they are known
_FACTS = {
    "rank": "rank",
    "micro_step": "micro_step",
    "micro_sequence_idx": "micro_sequence",
    "export_sequence_idx": "sequence",
}
_OWN_FACTS = {
    "sample_id": "sample",
    "rollout_id": "rollout",
    "group_id": "group",
    "weight_versions": "versions",
    "reward": "reward",
    "loss_weight": "loss_weight",
    "epoch": "epoch",
    "loss": "loss",
}

_encode = msgspec.json.Encoder().encode  # numbers that are not finite become null


def write_lines(path: Path, step: int, rank: int, first: int, held: Sequence[Sequences]) -> None:
    """Write sequences of one step and rank; the first of them is number `first` of the rank."""
    with open_private(path, "wb") as out:
        for sequences in held:
            ends = sequences.lengths.cumsum().tolist()
            for place, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
                facts = {name: values[place] for name, values in sequences.facts.items()}
                columns = {name: values[start:stop].tolist() for name, values in sequences.columns.items()}
                line = _line(step, facts | {"rank": rank, "sequence": first + place}, columns, stop - start)
                out.write(_encode(line) + b"\n")
            first += len(sequences)


def _line(step: int, facts: dict[str, Any], columns: dict[str, Any], length: int) -> dict[str, Any]:
    if "reward" in facts:
        columns.setdefault("rewards", [facts["reward"]] * length)
    absent = [None] * length
    return {
        "schema_version": _SCHEMA_VERSION,
        "step": step,
        "export_step": step,
        **{field: facts[name] for field, name in _FACTS.items()},
        "run_id": None,
        "env_name": facts.get("env"),
        **{field: columns.get(name, absent) for field, name in _FIELDS.items()},
        **{field: columns[name] for field, name in _OWN_FIELDS.items() if name in columns},
        **{field: facts.get(name) for field, name in _OWN_FACTS.items()},
    }


def read_lines(path: Path) -> Iterator[TokenRecord]:
    """Read the records of a file, also of one that prime-rl wrote; a null among numbers is NaN."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield parse_line(line, f"{path}, line {number}")
    except OSError as error:
        raise DamagedTapeError(f"{path}: cannot be read: {error.strerror or error}") from None


def parse_line(line: bytes, where: str) -> TokenRecord:
    """The record of one line; `where` names it in errors."""
    try:
        row = json.loads(line)
        fields = {name: row[field] for field, name in _FACTS.items()}
        fields |= {name: row.get(field) for field, name in _OWN_FACTS.items()}
        fields |= {name: _array(name, row.get(field)) for field, name in (_FIELDS | _OWN_FIELDS).items()}
        fields["versions"] = tuple(fields["versions"] or ())
        fields["epoch"] = fields["epoch"] or 0  # a file of prime-rl's own names none
        # The step of the run. A trainer that serves several runs also has its own count of steps.
        return TokenRecord(step=row.get("export_step", row["step"]), env=row["env_name"], **fields)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecordError) as error:
        raise DamagedTapeError(f"{where}: not a token record: {error!r}") from None


def _array(name: str, values: list[Any] | None) -> Any:
    column = TOKEN_COLUMNS[name]
    if column.optional and (values is None or (values and all(value is None for value in values))):
        return None
    if values is None:
        raise RecordError(f"the column {name} is missing")
    return np.array(values, column.dtype)
