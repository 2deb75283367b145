"""Export the matching rows of the table as CSV, or their rollouts or samples as `rolltape export` does."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rolltape.errors import NoAnswer
from rolltape.records.policy import Credit, CutPolicy
from rolltape.tape.stored import Key
from rolltape.view.answers import parse_policy
from rolltape.view.run.listing import Listing, Query
from rolltape.view.run.rows import Array

if TYPE_CHECKING:  # the import for loading rollouts takes longer than the first page
    from rolltape.tape.run import Run

FORMS = {"csv": "text/csv", "rollouts": "application/x-ndjson", "samples": "application/x-ndjson"}
_ENDINGS = {"csv": "csv", "rollouts": "jsonl", "samples": "jsonl"}
_CHUNK = 256 * 1024  # bytes
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # spreadsheets treat texts with these beginnings as formulas
_LEFT_OUT = ("short", "tries", "live", "terms", "problems")


def export_form(query: Query) -> str:
    """The kind of the export."""
    form = query.get("form") or "csv"
    if form not in FORMS:
        raise NoAnswer(f"form is {form[:40]!r}; give {', '.join(FORMS)}")
    parse_policy(query.get("policy"))
    return form


def file_name(run: str, query: Query) -> str:
    form = export_form(query)
    policy = f"-{parse_policy(query.get('policy')).name}" if form == "samples" else ""
    return f"{run}-{'rollouts' if form == 'csv' else form}{policy}.{_ENDINGS[form]}"


def table_rows(listing: Listing, chosen: Array) -> Iterator[bytes]:
    """Yield rows of the table as CSV in order, with a column for each term of the reward."""
    terms = [f"term.{name}" for name in listing.terms.names]
    head: list[str] | None = None
    for row in chosen.tolist():
        values = listing.row(row)
        plain = {name: value for name, value in values.items() if name not in _LEFT_OUT}
        plain["tags"] = " ".join(values["tags"])
        plain |= {f"term.{name}": values["terms"].get(name) for name in listing.terms.names}
        if head is None:
            head = [name for name in plain if name not in terms] + terms
            yield _csv_line(head)
        yield _csv_line([plain[name] for name in head])


def rollout_lines(run: "Run", keys: Sequence[Key]) -> Iterator[bytes]:
    """Yield rollouts as `rolltape export --what rollouts` writes them."""
    from rolltape.export.files import json_line
    from rolltape.export.schema import RowKind, rollout_row

    for rollout in run.load_each(keys):
        yield json_line(rollout_row(rollout), RowKind.ROLLOUT)


def sample_lines(run: "Run", keys: Sequence[Key], policy: CutPolicy) -> Iterator[bytes]:
    """Yield samples as `rolltape export` writes them: the tries that count, with advantages over whole groups."""
    from rolltape.export.files import json_line
    from rolltape.export.schema import SAMPLE, RowKind
    from rolltape.samples.credit import counted_tries
    from rolltape.samples.linearize import samples_of_rollouts

    listed = run.index()
    counted = {row.key for row in counted_tries(listed)}
    rollouts = run.load_each([key for key in keys if key in counted])
    for sample in samples_of_rollouts(rollouts, listed, policy, Credit(), run.versions()):
        yield json_line(SAMPLE.row(sample), RowKind.SAMPLE)


def in_chunks(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines joined to chunks, so that they need few calls of a thread."""
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _CHUNK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _csv_line(values: Sequence[Any]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([_cell(value) for value in values])
    return out.getvalue().encode("utf-8", "replace")


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
