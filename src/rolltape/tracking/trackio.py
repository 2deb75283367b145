"""Trackio: metrics and `trackio.Trace`s of each step, in the caller's run or in a run that stays on this machine."""

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Unpack

from rolltape.errors import SinkError
from rolltape.records.jsonable import valid_text
from rolltape.records.trace import Fields, Trace
from rolltape.tracking.sinks import Outbox, OutboxOptions, import_package
from rolltape.tracking.summary import ShownStep, step_metrics, steps_in
from rolltape.tracking.traces import SpanKind, trace_messages, trace_metadata, trace_spans, without_empty

if TYPE_CHECKING:
    from trackio.run import Run

_INT_LIMIT = 2**63
# Each of these makes trackio read or write on another machine.
_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID")

# Private parts of trackio that are used here, because its public API cannot do the same. They are checked by name: to
# override a method that no longer exists would fail silently.
_PRIVATE = {
    "trackio.context_vars": ("current_run",),
    "trackio.run": ("Run._get_username",),
    "trackio.sqlite_storage": tuple(
        f"SQLiteStorage.{name}"
        for name in ("get_logs", "get_log_count", "get_project_db_path", "validate_project_name")
    ),
    "trackio.utils": ("TRACKIO_DIR", "get_storage_mode"),
}


def trackio_sink(
    *,
    project: str | None = None,
    name: str | None = None,
    run: "Run | None" = None,
    **options: Unpack[OutboxOptions],
) -> Outbox:
    """A sink into the trackio run `run`, by default the caller's current run; with `project`, into a separate run.

    A separate run stays on this machine, and continues a run of the same name.

    Example:

        with rolltape.trackio_sink(project="sums", name="exp1") as sink:
            rolltape.show_batch(sink, batch, tokenizer, split="train", step=3)
    """
    if project is not None and run is not None:
        raise SinkError(f"trackio: both a run and the project {project!r} are given; give one of them")
    tracker = RunTracker(run or _current_run()) if project is None else LocalTracker(project, name)
    return Outbox(tracker, **options)


class RunTracker:
    """A run that the caller opened and will finish."""

    def __init__(self, run: "Run") -> None:
        self._run = run

    def holds(self, split: str, step: int) -> bool:
        """Always False: the caller owns the run."""
        return False

    def put(self, shown: ShownStep) -> None:
        """Log the metrics and the traces of a step in one entry."""
        import trackio

        traces = [
            trackio.Trace(
                messages=_storable(trace_messages(trace)),
                metadata=_storable(trace_metadata(shown, trace)),
                spans=_storable(_spans(trace)),
            )
            for trace in shown.traces
        ]
        # An empty list would be a metric of another kind.
        entry: dict[str, Any] = {**step_metrics(shown), **({f"{shown.split}/traces": traces} if traces else {})}
        self._run.log(entry, step=shown.step)

    def close(self) -> None:
        """Do nothing: the run is the caller's."""


class LocalTracker(RunTracker):
    """A run in a project on this machine. Trackio logs in the background, so `close` checks what is stored."""

    def __init__(self, project: str, name: str | None = None) -> None:
        super().__init__(_local_run(project, name))
        self._held = _stored_steps(self._run)
        self._before = _count_entries(self._run)
        self._given = 0

    def holds(self, split: str, step: int) -> bool:
        """Whether the run had the metrics of that step when it was opened."""
        return (split, step) in self._held

    def put(self, shown: ShownStep) -> None:
        super().put(shown)
        self._given += 1

    def close(self) -> None:
        """Finish the run. Raises if its database holds less than was logged."""
        from trackio.utils import TRACKIO_DIR, get_storage_mode

        self._run.finish()  # type: ignore[no-untyped-call]
        # On a network file system entries first go to an inbox, which trackio's page empties.
        stored = _count_entries(self._run) - self._before
        if stored < self._given and get_storage_mode() == "sqlite":
            raise SinkError(
                f"trackio run {self._run.name}: {self._given} entries were logged, but {stored} are stored under "
                f"{TRACKIO_DIR}; trackio's own warnings say why, and pushing again adds what is missing"
            )


def _spans(trace: Trace) -> list[Fields]:
    """The spans of a trace in the form of trackio's page, without unknown fields."""
    return [
        without_empty(
            id=span.id,
            parent_id=span.parent_id,
            name=span.name,
            kind=span.kind,
            status=None if span.kind is SpanKind.TOOL else "error" if span.failed else "success",
            error=span.error,
            input=span.input,
            output=span.output,
            model=None if span.kind is SpanKind.TOOL else trace.model,
            usage=without_empty(input_tokens=span.prompt_tokens, output_tokens=span.sampled_tokens),
            start_time=_iso_time(span.started_at),
            end_time=_iso_time(span.ended_at),
            metadata=span.metadata,
        )
        for span in trace_spans(trace)
    ]


def _iso_time(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return None  # not a valid time


def _storable(value: Any) -> Any:
    """A value that trackio's encoder accepts. It drops a whole entry for one wide integer or lone surrogate."""
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, int) and not -_INT_LIMIT <= value < _INT_LIMIT:
        return str(value)
    return value


def _current_run() -> "Run":
    """The run that `trackio.log` would log into here."""
    import_package("trackio", extra="trackio", private=_PRIVATE)
    from trackio import context_vars

    run = context_vars.current_run.get()
    if run is None:
        raise SinkError("trackio has no current run here; call trackio.init first, or give a run or a project")
    return run


def _local_run(project: str, name: str | None) -> "Run":
    """A run that stays on this machine. A run of the same name is continued."""
    for variable in _ELSEWHERE:
        if os.environ.get(variable):
            raise SinkError(
                f"trackio: {variable} is set, but a run that rolltape opens stays on this machine; unset it, "
                "or open the run with trackio.init and pass it"
            )
    import_package("trackio", extra="trackio", private=_PRIVATE)
    try:
        return _open_run(project, name)
    except Exception as error:  # trackio does not document what it raises
        raise SinkError(f"trackio: project {project!r} cannot be opened: {error}") from error


def _stored_steps(run: "Run") -> set[tuple[str, int]]:
    """The splits and steps whose metrics are stored."""
    from trackio.sqlite_storage import SQLiteStorage

    entries = SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
    return steps_in((metric, int(entry["step"])) for entry in entries for metric in entry)


def _count_entries(run: "Run") -> int:
    """How many entries of a run are in the database."""
    from trackio.sqlite_storage import SQLiteStorage

    return int(SQLiteStorage.get_log_count(run.project, run.name, run_id=run.id))


def _open_run(project: str, name: str | None) -> "Run":
    """Open a run without trackio.init, which would end the caller's run and ask the hub who is logged in."""
    import trackio
    from trackio.run import Run
    from trackio.sqlite_storage import SQLiteStorage

    class LocalRun(Run):
        def _get_username(self) -> None:
            """Nobody."""

    SQLiteStorage.validate_project_name(project)
    is_new = not SQLiteStorage.get_project_db_path(project).exists()
    there = [] if is_new else list(trackio.Api().runs(project))
    ids = [one.id for one in there if one.name == name]
    return LocalRun(
        url=None,
        project=project,
        client=None,
        name=name,
        run_id=ids[-1] if ids else None,
        existing_runs=[one.name for one in there],
    )
