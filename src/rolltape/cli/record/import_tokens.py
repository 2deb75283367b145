"""Writes the token records of prime-rl's trainer into the run that its token exports were imported into."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.importers.files import files_of
from rolltape.records.sample import Sample
from rolltape.records.token_record import TokenRecord
from rolltape.samples import linearize
from rolltape.tape.run import Run, read
from rolltape.tokens.files import read_tokens, write_tokens
from rolltape.tokens.primerl import parse_line
from rolltape.tokens.steps import Format

_KIND = "prime-rl"


def keep_token_records(run: Path, path: Path) -> int:
    """Write the token records of an export into the run, each with its sample, and return how many its steps hold.

    A record belongs to the imported sample with the same ids. The import has already named lines that cannot be read.
    """
    by_step: dict[int, list[TokenRecord]] = defaultdict(list)
    samples = _imported_samples(read(run))
    for record in _records(path):
        if held := samples.get(_ids(record)):
            sample = held.pop() if len(held) > 1 else held[0]
            by_step[sample.step].append(
                msgspec.structs.replace(
                    record, step=sample.step, sample=sample.id, rollout=sample.rollout, group=sample.group
                )
            )
    return sum(_write_step(run, step, records) for step, records in by_step.items())


def _records(path: Path) -> Iterator[TokenRecord]:
    for file in files_of(path, ".jsonl"):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield parse_line(line, f"{file}, line {number}")
                except DamagedTapeError:
                    continue


def _imported_samples(run: Run) -> dict[bytes, list[Sample]]:
    """The samples of imported rollouts by their ids. Samples with equal ids share a list, last one first."""
    samples: dict[bytes, list[Sample]] = defaultdict(list)
    for rollout in run.rollouts():
        if rollout.head.extra.get("imported", {}).get("kind") == _KIND:
            for sample in linearize(rollout, "exact").samples():
                samples[_ids(sample)].insert(0, sample)
    return samples


def _ids(one: TokenRecord | Sample) -> bytes:
    return one.ids.astype("<i8").tobytes()


def _write_step(run: Path, step: int, records: Iterable[TokenRecord]) -> int:
    held = {record.sample: record for record in read_tokens(run, step=step)}
    held |= {record.sample: record for record in records}
    return write_tokens(run, step, held.values(), file_format=Format.JSONL)
