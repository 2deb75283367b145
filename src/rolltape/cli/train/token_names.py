"""Which token record a name means: its place, or its sample, whole or as lists cut it."""

from collections.abc import Sequence

from rolltape.cli.exits import UsageError
from rolltape.cli.output.screen import SHORT_ID
from rolltape.records.ids import last_turn_of
from rolltape.records.token_record import TokenRecord
from rolltape.tokens.files import read_step
from rolltape.tokens.steps import TokenStep

_LISTED = "`rolltape tokens RUN --step N` lists them"


def named_record(steps: Sequence[TokenStep], rank: int | None, name: str | None) -> TokenRecord:
    """The one record of that place or sample; a sample that several micro-batches hold is given in its last."""
    if name is None:
        raise UsageError(f"RECORD: name one, by its place or its sample ({_LISTED})")
    place = name if _is_place(name) else _last_place(steps, rank, name)
    step_number, its_rank, _ = map(int, place.split("."))
    for step in steps:
        if step.step == step_number:
            for record in read_step(step, its_rank):
                if record.place == place:
                    return record
    raise UsageError(f"RECORD: there is no token record {name}; {_LISTED}")


def short_sample(sample: str | None) -> str:
    """A sample's id with a rollout that is cut as everywhere."""
    if sample is None:
        return ""
    rollout, dot, rest = sample.partition(".")
    return f"{rollout[:SHORT_ID]}{dot}{rest}"


def _is_place(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 3 and all(part.isdecimal() for part in parts)


def _last_place(steps: Sequence[TokenStep], rank: int | None, name: str) -> str:
    """The place of the last record of the one sample whose id begins like that."""
    found: dict[str, str] = {}
    for step in steps:
        for record in read_step(step, rank, columns=()):
            if record.sample is not None and any(one.startswith(name) for one in _spellings(record.sample)):
                found[record.sample] = record.place
    whole = [sample for sample in found if name in _spellings(sample)]
    meant = whole if len(whole) == 1 else list(found)
    if not meant:
        raise UsageError(f"RECORD: there is no token record {name}; {_LISTED}")
    if len(meant) > 1:
        raise UsageError(f"RECORD: {name} may be {meant[0]} or {meant[1]}; give more of it, or a record's place")
    return found[meant[0]]


def _spellings(sample: str) -> tuple[str, ...]:
    """A sample's id, whole and cut, with and without its hash."""
    short = short_sample(sample)
    return sample, short, last_turn_of(sample), last_turn_of(short)
