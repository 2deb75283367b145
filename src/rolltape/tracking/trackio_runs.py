"""Runs of trackio: the caller's current one, or one that stays on this machine, and what is stored of it."""

import os
from importlib import import_module, metadata
from operator import attrgetter
from typing import TYPE_CHECKING

from rolltape.errors import SinkError
from rolltape.tracking.metrics import split_of_count

if TYPE_CHECKING:
    from trackio.run import Run

# Each of these makes trackio read or write elsewhere than on this machine.
_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID")

# What is used of trackio's insides, since nothing that it lists as public does the same. Checked by name: a method that
# is overridden here and called by nobody there would not be missed.
_INSIDE = {
    "trackio.context_vars": ("current_run",),
    "trackio.run": ("Run._get_username",),
    "trackio.sqlite_storage": tuple(
        f"SQLiteStorage.{name}"
        for name in ("get_logs", "get_log_count", "get_project_db_path", "validate_project_name")
    ),
    "trackio.utils": ("TRACKIO_DIR", "get_storage_mode"),
}


def current_run() -> "Run":
    """The run that trackio's own calls would log into here."""
    _import_trackio()
    from trackio import context_vars

    run = context_vars.current_run.get()
    if run is None:
        raise SinkError("trackio has no current run here; call trackio.init first, or give a run or a project")
    return run


def local_run(project: str, name: str | None) -> "Run":
    """A run that never leaves this machine; with the name of one that is there, that one goes on."""
    for variable in _ELSEWHERE:
        if os.environ.get(variable):
            raise SinkError(
                f"trackio: {variable} is set, but a run in a project of the sink's stays on this machine; unset it, "
                "or open the run with trackio.init and give it"
            )
    _import_trackio()
    try:
        return _opened(project, name)
    except Exception as error:  # trackio does not say what it raises
        raise SinkError(f"trackio: project {project!r} cannot be opened: {error}") from error


def steps_held(run: "Run") -> set[tuple[str, int]]:
    """The splits and steps whose figures are stored."""
    from trackio.sqlite_storage import SQLiteStorage

    entries = SQLiteStorage.get_logs(run.project, run.name, run_id=run.id)
    found = ((split_of_count(metric), int(entry["step"])) for entry in entries for metric in entry)
    return {(split, step) for split, step in found if split is not None}


def entries_stored(run: "Run") -> int:
    """How many entries the database has of a run."""
    from trackio.sqlite_storage import SQLiteStorage

    return int(SQLiteStorage.get_log_count(run.project, run.name, run_id=run.id))


def _import_trackio() -> None:
    try:
        import_module("trackio")
    except ImportError as error:
        raise SinkError(f"trackio cannot be imported ({error}); install rolltape[trackio]") from None
    try:
        for module, names in _INSIDE.items():
            attrgetter(*names)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise SinkError(
            f"trackio {metadata.version('trackio')} is not as this rolltape knows it ({error}); install the version "
            "that rolltape[trackio] asks for, or push to a .jsonl file"
        ) from None


def _opened(project: str, name: str | None) -> "Run":
    """Not by trackio.init, which would end the caller's run, and ask the hub who is logged in."""
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
