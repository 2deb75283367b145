"""Runs a collection from the command line: progress, signals, warnings, and the exit code."""

import asyncio
import logging
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec

from rolltape.cli.exits import Exit
from rolltape.cli.record.collect_progress import LogProgress, open_progress, print_report
from rolltape.cli.screen import note, print_json, print_long
from rolltape.collect.agents import agent_named, is_program
from rolltape.collect.collector import Collector, Launch
from rolltape.collect.dry_run import preview_attempts
from rolltape.collect.plan import open_tasks
from rolltape.collect.records import RecordFile
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.gateway import check_engines, resolve_model
from rolltape.collect.runners.ray import ClusterSettings, RayRunner, connect_to_cluster
from rolltape.collect.settings import CollectSettings
from rolltape.collect.stats import CollectionStats
from rolltape.errors import CollectError, ExportError, TapeWriteError
from rolltape.groups import RunAheadLimit
from rolltape.records.jsonable import encode_numbers
from rolltape.samples.summary import open_for_recording
from rolltape.serving import loop_factory, raise_file_limit
from rolltape.tape.rundir import RUN_FILE, make_private_file, make_private_folder

_SHOWN_WARNINGS = 20
_LONGEST_WARNING = 300  # characters
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_collection(
    settings: CollectSettings,
    run: Path,
    out: Path | None,
    cluster: ClusterSettings | None = None,
    *,
    resume: bool,
    as_json: bool,
    max_ahead: int | None = None,
) -> Exit:
    """Collect here or on a cluster, with progress while it runs and a report at the end.

    An unusable model, agent, task, engine or cluster is refused before the run is made, so that no empty run is left
    behind. On a cluster, programs and functions are looked up on the nodes.
    """
    if resume and not (run / RUN_FILE).is_file():
        raise CollectError(f"{run}: there is no run to resume; leave --resume out, or give the --run that was begun")
    if out is not None:
        _check_records_path(out, settings.source, run)
    if cluster is None:
        resolve_model(settings.model, settings.model_name, settings.engines)
    tasks = open_tasks(settings)
    if cluster is None or is_program(settings.agent):
        agent_named(settings.agent, in_image=settings.has_images or cluster is not None)
    connection = None if cluster is None else connect_to_cluster(cluster)
    if cluster is None and not (run / RUN_FILE).is_file():
        asyncio.run(check_engines(settings))
    raise_file_limit()
    tally, progress = CollectionStats(), open_progress(as_json=as_json)
    with ExitStack() as stack:
        stack.enter_context(_naming_how_to_continue(run))
        tape = stack.enter_context(open_for_recording(run))
        stack.enter_context(warnings_to(run / "logs" / "collect.log"))
        loop = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
        collector = Collector(
            settings,
            tape,
            resume=resume,
            runner=None if cluster is None else RayRunner(settings, tape, cluster, connection),
            run_ahead=None if max_ahead is None else RunAheadLimit(tape, max_groups=max_ahead),
            tasks=tasks,
        )
        records = None if out is None else stack.enter_context(closing(_open_records(out)))
        if records is not None and resume:
            records.add_missing(tape.run(), step=settings.step, source=collector.source_name)
        whole = loop.run(_run(collector, _Watcher(collector, tally, progress, records)))
        if records is not None and (resume or cluster is not None or records.lost):
            records.add_missing(tape.run(), step=settings.step, source=collector.source_name)
    if records is not None and records.lost:
        note(
            f"{records.path}: {records.lost} records are missing; "
            f"`rolltape export {shlex.quote(str(run))} --what records` writes them all from the run"
        )
    if collector.stopped is not None:
        how = "--resume with a higher limit" if collector.reached_limit else "--resume"
        note(f"stopped: {collector.stopped}; {how} continues")
    if collector.enough is not None:
        note(f"enough: {collector.enough}; the other tasks were not begun")
    if not as_json and tally.launch is not None:
        print_report(tally, run, settings.step, whole=whole)
    if collector.stopped is None and not whole:
        return Exit.INTERRUPTED
    if collector.reached_limit:
        return Exit.LIMIT
    if collector.stopped is not None or tally.failed or tally.ungraded:
        return Exit.FAILED
    return Exit.OUTPUT if progress.lost or (records is not None and records.lost) else Exit.OK


def print_previews(settings: CollectSettings, run: Path, *, as_json: bool) -> Exit:
    """Print what the agent would get for the first tasks, as JSON: on one line each, or indented."""
    for preview in preview_attempts(settings, run):
        if as_json:
            print_json(preview)
        else:
            for line in msgspec.json.format(encode_numbers(preview, "output"), indent=2).decode().splitlines():
                print_long(line)
    return Exit.OK


class _Watcher:
    """Passes a collector's results to the tally, the file of records, and the progress output."""

    def __init__(
        self, collector: Collector, tally: CollectionStats, progress: LogProgress, records: RecordFile | None
    ) -> None:
        self.progress = progress
        self._collector = collector
        self._tally = tally
        self._records = records

    def launched(self, launch: Launch) -> None:
        self._tally.launched(launch)
        self.progress.launched(launch)

    def results(self, results: Sequence[RolloutResult]) -> None:
        self._tally.add(results)
        for result in results:
            if self._records is not None and result.record is not None:
                self._records.add(result.record)
        self.progress.ended(results)

    async def report_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.progress.every_s)
            if self._tally.launch is not None:
                self.progress.progress(self._tally.figures(self._collector.in_flight))

    def over(self, *, whole: bool) -> None:
        endings = [
            {"status": status, "reason": reason, "rollouts": one.count, "mean_reward": one.rewards.mean}
            for (status, reason), one in self._tally.endings.items()
        ]
        self.progress.over(
            self._tally.figures(),
            {
                "rollouts": self._tally.rollouts,
                "endings": endings,
                "whole": whole,
                "usage": msgspec.structs.asdict(self._tally.usage),
                "stopped": self._collector.stopped,
            },
        )


async def _run(collector: Collector, watcher: _Watcher) -> bool:
    """Collect until everything is done or a signal stops it; True if everything is done."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            main.cancel()
        else:
            watcher.progress.stopping(collector.settings.grace_s)
            collector.end()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop)
    with closing(watcher.progress):
        reporting = asyncio.ensure_future(watcher.report_regularly())
        try:
            await collector.run(watcher.launched, watcher.results)
        except asyncio.CancelledError:
            if not signals:
                raise
        finally:
            reporting.cancel()
        whole = signals == 0 and collector.stopped is None
        watcher.over(whole=whole)
    return whole


@contextmanager
def _naming_how_to_continue(run: Path) -> Iterator[None]:
    """Add how to continue to an error of an existing tape, such as a full disk."""
    try:
        yield
    except TapeWriteError as error:
        if not (run / RUN_FILE).is_file():
            raise
        raise TapeWriteError(f"{error}; make room on that disk, or make it writable, then --resume continues") from None


def _check_records_path(out: Path, source: str, run: Path) -> None:
    if out.exists() and Path(source).exists() and out.samefile(source):
        raise ExportError(f"-o {out}: this is the file of the tasks; name another for the records")
    if not out.parent.is_dir() and not out.resolve().is_relative_to(run.resolve()):
        raise ExportError(f"-o {out}: there is no folder {out.parent}; make it, or name a file in another one")


def _open_records(out: Path) -> RecordFile:
    try:
        return RecordFile(out, note)
    except OSError as error:
        raise ExportError(f"-o {out}: cannot be written: {error.strerror}") from None


@contextmanager
def warnings_to(file: Path) -> Iterator[None]:
    """Print the first warnings that are logged within the block, and append all of them to a file. Never raises."""
    logger = logging.getLogger("rolltape")
    handlers = [_NotedWarnings(file), _WarningFile(file, delay=True, encoding="utf-8")]
    handlers[1].setFormatter(logging.Formatter(_LOG_FORMAT))
    for handler in handlers:
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


class _NotedWarnings(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._shown = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._shown += 1
        error = record.exc_info[1] if record.exc_info else None
        cause = "" if error is None else f": {type(error).__name__}: {error}"
        with suppress(OSError):
            if self._shown <= _SHOWN_WARNINGS:
                note(f"{record.getMessage()}{cause}"[:_LONGEST_WARNING])
            if self._shown == _SHOWN_WARNINGS:
                note(f"further warnings go only to {self._file}")


class _WarningFile(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            make_private_folder(Path(self.baseFilename).parent)
            make_private_file(Path(self.baseFilename))
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk must not end the collection."""
