"""Weights & Biases: metrics of each step and a table of its rollouts, in the caller's run or in a separate one."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rolltape.errors import SinkError
from rolltape.records.ids import digest_of
from rolltape.tracking.sinks import Outbox, OutboxOptions, import_package
from rolltape.tracking.summary import ShownStep, parse_count_metric, step_metrics, steps_in
from rolltape.tracking.traces import trace_metadata, trace_text

if TYPE_CHECKING:
    from wandb import Run, Table

# The x axis of our metrics. W&B's own axis counts rows, and W&B refuses a row with a lower number than the last.
_AXIS = "rolltape/step"
_COLUMNS = (
    *("rollout", "try", "group", "task_id", "attempt", "status", "stop_reason", "reason", "reward", "turns"),
    *("prompt_tokens", "sampled_tokens", "tokens", "first_version", "last_version", "model", "agent", "page"),
)


def wandb_sink(
    *, project: str | None = None, name: str | None = None, run: "Run | None" = None, **options: Unpack[OutboxOptions]
) -> Outbox:
    """A sink into the W&B run `run`, by default the caller's current run; with `project`, into a separate run.

    `project` may name an entity, `team/sums`. A separate run continues a run of the same name.

    Example:

        with rolltape.wandb_sink(project="sums", name="exp1") as sink:
            rolltape.show_step(sink, run, step=3)
    """
    if project is not None and run is not None:
        raise SinkError(f"wandb: both a run and the project {project!r} are given; give one of them")
    if project is not None:
        return Outbox(WandbTracker(project, name or "rolltape"), **options)
    return Outbox(WandbRunTracker(run or _current_run()), **options)


class WandbRunTracker:
    """A run that the caller opened and will finish. Our metrics are added to the caller's rows.

    A separate row would raise the row number, and W&B would drop a row of the caller with a lower number. So a step is
    added to the row that the caller fills. It waits for the next row if it would hide another step.
    """

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._defined: set[str] = set()
        self._waiting: list[ShownStep] = []
        self._row = -1
        self._in_row: dict[str, int] = {}  # the steps that were added to that row, by split

    def holds(self, split: str, step: int) -> bool:
        """Always False: the caller owns the run."""
        return False

    def put(self, shown: ShownStep) -> None:
        queued, self._waiting = [*self._waiting, shown], []
        for one in queued:
            if self._run.step != self._row:
                self._row, self._in_row = self._run.step, {}
            if one.split in self._in_row or any(step != one.step for step in self._in_row.values()):
                self._waiting.append(one)
            else:
                self._run.log(self._entry(one), commit=False)
                self._in_row[one.split] = one.step

    def close(self) -> None:
        """Log waiting steps in separate rows. The run stays open."""
        for shown in self._waiting:
            self._run.log(self._entry(shown))

    def _entry(self, shown: ShownStep) -> dict[str, Any]:
        """What is logged for a step. The x axis of each metric is defined once."""
        metrics = step_metrics(shown)
        for name in metrics.keys() - self._defined:
            if "*" not in name:  # W&B reads it as a pattern
                self._run.define_metric(name, step_metric=_AXIS)
        self._defined |= metrics.keys()
        table = {f"{shown.split}/traces": _table(shown)} if shown.traces else {}
        return {**metrics, **table, _AXIS: shown.step}


class WandbTracker(WandbRunTracker):
    """A run of a project, found again by its name. W&B's own settings decide whether it is offline."""

    def __init__(self, project: str, name: str) -> None:
        super().__init__(_open_run(project, name))
        rows = list(self._stored_rows())
        self._held = steps_in((metric, int(row[_AXIS])) for row in rows for metric in row if _AXIS in row)
        # W&B numbers rows of an offline run anew in each process. They would overwrite each other on a server.
        self._row = max([self._run.step, *(int(row["_step"]) + 1 for row in rows if "_step" in row)])
        self._given: set[tuple[str, int]] = set()

    def holds(self, split: str, step: int) -> bool:
        return (split, step) in self._held

    def put(self, shown: ShownStep) -> None:
        self._run.log(self._entry(shown), step=self._row, commit=True)
        self._row += 1
        self._given.add((shown.split, shown.step))

    def close(self) -> None:
        """Finish the run. Raises if the file of an offline run holds less than was logged."""
        self._run.finish()
        if not self._run.offline:
            return
        file = Path(self._run.settings.sync_file)
        if not self._given:
            _discard(file.parent)
            return
        stored = steps_in((metric, int(row[_AXIS])) for row in _read_rows(file) for metric in row)
        if lost := self._given - stored:
            raise SinkError(f"{file}: {len(lost)} of {len(self._given)} steps that were logged are not in the file")

    def _stored_rows(self) -> Iterator[dict[str, Any]]:
        """The rows that the run had before this process opened it."""
        run = self._run
        if run.offline:
            own = Path(run.settings.sync_file)
            for file in sorted(own.parent.parent.glob(f"*run-*-{run.id}/{own.name}")):
                if file != own:
                    yield from _read_rows(file)
        elif run.resumed:
            import wandb

            stored = wandb.Api().run(run.path)
            names: list[str] = list(stored.summary.keys())  # type: ignore[no-untyped-call]
            for metric in [name for name in names if parse_count_metric(name) is not None]:
                yield from stored.scan_history(keys=[metric, _AXIS, "_step"])


def run_id(project: str, name: str) -> str:
    """The id of the run of that name, so that W&B finds it again."""
    return digest_of("wandb", project, name).hex()[:16]


def _open_run(project: str, name: str) -> "Run":
    """Open a run beside other runs of this process. W&B records nothing about the machine and the program."""
    _import_wandb()
    import wandb

    entity, _, own = project.rpartition("/")
    _wait_for_own_folder(run_id(own, name))
    try:
        run = wandb.init(
            entity=entity or None,
            project=own,
            name=name,
            id=run_id(own, name),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
    except wandb.Error as error:
        raise SinkError(
            f"wandb: project {project!r} cannot be opened: {error}; log in with `wandb login`, or set "
            "WANDB_MODE=offline"
        ) from error
    if run.disabled:
        run.finish()
        raise SinkError("wandb: it is disabled here and would keep nothing; unset WANDB_MODE, or set it to offline")
    return run


def _current_run() -> "Run":
    """The run that `wandb.log` would log into here."""
    _import_wandb()
    import wandb

    if wandb.run is None:
        raise SinkError("wandb has no current run here; call wandb.init first, or give a run or a project")
    return wandb.run


def _table(shown: ShownStep) -> "Table":
    """A row per rollout, with its conversation as text."""
    import wandb

    rows = []
    for trace in shown.traces:
        about = trace_metadata(shown, trace)
        rows.append([*(about.get(name) for name in _COLUMNS), trace_text(trace)])
    return wandb.Table(columns=[*_COLUMNS, "conversation"], data=rows, allow_mixed_types=True)


def _read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows in the file of an offline run, read with W&B's own command."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SinkError(f"{file}: wandb cannot read it: {(done.stderr or done.stdout).strip()}")
    records = map(json.loads, done.stdout.splitlines())
    return (record["history"]["item"] for record in records if record["type"] == "history")


def _wait_for_own_folder(identity: str) -> None:
    """Wait while an offline run has a folder of this second: W&B names folders by it, and would overwrite the file."""
    root = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
    while (root / f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-{identity}").exists():
        time.sleep(0.02)


def _discard(folder: Path) -> None:
    """Remove an offline run that this process made and logged nothing into."""
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.parent / "latest-run"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _import_wandb() -> None:
    """Import wandb with its error reporting off."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import_package("wandb", extra="wandb")
