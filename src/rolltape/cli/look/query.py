"""`rolltape query`: run SQL over a run."""

import csv
import enum
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Annotated, Any

from rolltape import export
from rolltape.cli.options import JsonOption, RunArgument, TrainingOptions
from rolltape.cli.parameters import argument, either, option
from rolltape.cli.runs import OpenedRun, SelectedRollouts, open_run, report_problems
from rolltape.cli.screen import print_json, print_table, tracked
from rolltape.errors import UsageError
from rolltape.extras import duckdb, pa
from rolltape.records.policy import Credit, CutPolicy

TABLES = ("rollouts", "turns", "messages", "samples")
_ROWS_AT_A_TIME = 1000
# DuckDB's settings that let a statement reach beyond the run; all are on by default.
_EXTERNAL = ("enable_external_access", "autoinstall_known_extensions", "autoload_known_extensions")
# These columns are never shortened: half an id finds nothing.
_IDS = ("rollout", "session", "turn", "sample", "group")


class QueryOutput(enum.StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def query(
    run: RunArgument,
    sql: Annotated[str, argument("SQL", "A SQL statement over rollouts, turns, messages, and samples.")],
    *,
    form: Annotated[QueryOutput, option("--format NAME", f"Output format: {either(QueryOutput)}.")] = QueryOutput.TABLE,
    as_json: JsonOption = False,
    external_access: Annotated[
        bool, option("--external-access", "Let SQL read and write files and URLs, and install extensions.")
    ] = False,
    training: TrainingOptions,
) -> int:
    """Run SQL over rollouts, turns, messages, and samples."""
    if as_json and form is QueryOutput.CSV:
        raise UsageError("--json: --format csv is given too; leave one of them out")
    policy, credit = training.cut_policy(), training.credit()
    tape = open_run(run)
    config = dict.fromkeys(_EXTERNAL, external_access)
    # DuckDB must not resolve unknown table names to this program's variables.
    with duckdb.connect(config={"python_enable_replacements": False, **config}) as connection:
        for name in _tables_in(sql, connection):
            connection.register(name, _table(name, tape, policy, credit))
        try:
            connection.execute(sql)
            if connection.description is None:
                raise UsageError("SQL: no statement; try 'SELECT * FROM rollouts'")
            _print(
                _distinct(column[0] for column in connection.description),
                _rows(connection),
                QueryOutput.JSON if as_json else form,
            )
        except duckdb.Error as error:
            hint = "; --external-access allows it" if isinstance(error, duckdb.PermissionException) else ""
            raise UsageError(f"SQL: {str(error).splitlines()[0]}{hint}") from None
    return report_problems(tape)


def _tables_in(sql: str, connection: "duckdb.DuckDBPyConnection") -> list[str]:
    """The run's tables that a statement names. Only these are built."""
    ((serialized,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    parsed = json.loads(serialized)
    if parsed.get("error"):
        # Not a SELECT, or invalid: build every table whose name occurs, and let DuckDB report the error.
        return [name for name in TABLES if name in sql.lower()]
    named: set[str] = set()
    stack: list[Any] = [parsed]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if node.get("type") == "BASE_TABLE":
                named.add(str(node.get("table_name")).lower())
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return [name for name in TABLES if name in named]


def _table(name: str, tape: OpenedRun, policy: CutPolicy, credit: Credit) -> "pa.Table":
    if name == "rollouts":
        return export.rollouts_table(
            (row.head, row.outcome, row.sessions, row.turns, row.sampled_tokens) for row in tape.rows
        )
    if name == "samples":
        counted = SelectedRollouts(tape, counted_only=True)
        with counted.named_in_errors():
            return export.samples_table(counted.samples(policy, credit))
    selected = SelectedRollouts(tape)
    rollouts = tracked(selected, name, len(selected))
    with selected.named_in_errors():
        return export.turns_table(rollouts) if name == "turns" else export.messages_table(rollouts)


def _rows(connection: "duckdb.DuckDBPyConnection") -> Iterator[tuple[Any, ...]]:
    while rows := connection.fetchmany(_ROWS_AT_A_TIME):
        yield from rows


def _distinct(names: Iterable[str]) -> list[str]:
    """Column names, numbered where one repeats, as DuckDB does for a table."""
    found: dict[str, None] = {}
    for name in names:
        free = (f"{name}_{at}" if at else name for at in count())
        found[next(one for one in free if one not in found)] = None
    return list(found)


def _print(columns: Sequence[str], rows: Iterator[tuple[Any, ...]], form: QueryOutput) -> None:
    if form is QueryOutput.JSON:
        for row in rows:
            print_json({name: _plain(value) for name, value in zip(columns, row, strict=True)})
    elif form is QueryOutput.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)
    else:
        held = list(rows)
        text_columns = [
            name for at, name in enumerate(columns) if any(isinstance(row[at], str | list | dict) for row in held)
        ]
        print_table(
            columns,
            [[_cell(value) for value in row] for row in held],
            left=text_columns,
            flexible=[name for name in text_columns if name not in _IDS],
        )


def _plain(value: object) -> object:
    """A value for JSON; dates, decimals, and the like become text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else str(value)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(_plain(value), ensure_ascii=False) if isinstance(value, list | dict | tuple) else str(value)
