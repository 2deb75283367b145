"""Trackio: the steps of a split as metrics and `trackio.Trace`s, in a run of the caller or in one on this machine."""

from typing import TYPE_CHECKING, Any

from rolltape.errors import SinkError
from rolltape.records.choice import Choice
from rolltape.records.summary import ShownStep
from rolltape.tracking.about import about
from rolltape.tracking.conversation import messages_of, spans_of
from rolltape.tracking.metrics import metrics_of
from rolltape.tracking.outbox import Outbox
from rolltape.tracking.trackio_runs import current_run, entries_stored, local_run, steps_held

if TYPE_CHECKING:
    from trackio.run import Run

_WIDEST = 2**63


def trackio_sink(
    *,
    project: str | None = None,
    name: str | None = None,
    run: "Run | None" = None,
    max_traces_per_step: int = 8,
    choice: Choice | str = Choice.FIRST,
    max_waiting: int = 16,
) -> Outbox:
    """A sink into `run`, or into the current run of the caller; with a project, into a run of its own in it.

    A run of its own stays on this machine, and goes on where one of that name ended.
    """
    if project is not None and run is not None:
        raise SinkError(f"trackio: both a run and the project {project!r} are given; give one of them")
    tracker = RunTracker(run or current_run()) if project is None else LocalTracker(project, name)
    return Outbox(tracker, max_traces_per_step=max_traces_per_step, choice=choice, max_waiting=max_waiting)


class RunTracker:
    """A run that the caller has opened, and will finish."""

    def __init__(self, run: "Run") -> None:
        self._run = run

    def holds(self, split: str, step: int) -> bool:
        """Never: what a run holds is its owner's business."""
        return False

    def put(self, shown: ShownStep) -> None:
        """Log the figures and the traces of a step in one entry."""
        import trackio

        traces = [
            trackio.Trace(
                messages=_storable(messages_of(trace)),
                metadata=_storable(about(trace, shown.split)),
                spans=_storable(spans_of(trace)),
            )
            for trace in shown.traces
        ]
        # An empty list would be a metric of another kind.
        entry: dict[str, Any] = {**metrics_of(shown), **({f"{shown.split}/traces": traces} if traces else {})}
        self._run.log(entry, step=shown.step)

    def close(self) -> None:
        """Nothing: the run goes on."""


class LocalTracker(RunTracker):
    """A run in a project on this machine. Trackio logs in the background, so `close` looks at what is stored."""

    def __init__(self, project: str, name: str | None = None) -> None:
        super().__init__(local_run(project, name))
        self._held = steps_held(self._run)
        self._before = entries_stored(self._run)
        self._given = 0

    def holds(self, split: str, step: int) -> bool:
        """Whether the run had the figures of that step when it was opened."""
        return (split, step) in self._held

    def put(self, shown: ShownStep) -> None:
        super().put(shown)
        self._given += 1

    def close(self) -> None:
        """Finish the run; raises if its database holds less than was logged."""
        from trackio.utils import TRACKIO_DIR, get_storage_mode

        self._run.finish()  # type: ignore[no-untyped-call]
        # On a network file system entries first go to an inbox, which trackio's page empties.
        stored = entries_stored(self._run) - self._before
        if stored < self._given and get_storage_mode() == "sqlite":
            raise SinkError(
                f"trackio run {self._run.name}: {self._given} entries were logged, but {stored} are stored under "
                f"{TRACKIO_DIR}; trackio's own warnings say why, and pushing again adds what is missing"
            )


def _storable(value: Any) -> Any:
    """A value that trackio's encoder takes: it drops a whole entry for one wide integer or lone surrogate."""
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not value.isascii() else value
    if isinstance(value, int) and not -_WIDEST <= value < _WIDEST:
        return str(value)
    return value
