"""A collection from the command line: run while it is watched, ended by signals, and what its exit code is."""

import asyncio
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rolltape.cli.exits import Exit
from rolltape.cli.output.screen import note
from rolltape.cli.record.collect_log import logged_to
from rolltape.cli.record.collect_progress import Telling, told_by
from rolltape.cli.record.collect_report import print_report
from rolltape.collect.collector import Collector, Launch
from rolltape.collect.recordfile import RecordFile
from rolltape.collect.result import Result
from rolltape.collect.runners.models import model_of
from rolltape.collect.runners.ray import ClusterSettings, RayRunner
from rolltape.collect.settings import CollectSettings
from rolltape.collect.stats import Tally
from rolltape.errors import ExportError
from rolltape.gateway.serve import loop_factory
from rolltape.groups import Room
from rolltape.tape.recording.tape import open_tape


def collected(
    settings: CollectSettings,
    run: Path,
    out: Path | None,
    cluster: ClusterSettings | None = None,
    *,
    resume: bool,
    as_json: bool,
    max_ahead: int | None = None,
) -> Exit:
    """Collect, here or on a cluster, and say how it goes and what it came to."""
    if cluster is None:
        model_of(settings.model, settings.model_name, settings.engines)  # if that is wrong, no run is made
    tally, told = Tally(), told_by(as_json=as_json)
    with ExitStack() as stack:
        tape = stack.enter_context(open_tape(run))
        stack.enter_context(logged_to(run / "logs" / "collect.log"))
        loop = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
        collector = Collector(
            settings,
            tape,
            resume=resume,
            runner=None if cluster is None else RayRunner(settings, tape, cluster),
            room=None if max_ahead is None else Room(tape, max_groups=max_ahead),
        )
        records = None if out is None else _opened(out, settings.source)
        if records is not None:
            stack.callback(records.close)
        whole = loop.run(_run(collector, _Watched(collector, tally, told, records), told))
    if records is not None and records.lost:
        note(f"{records.path}: {records.lost} records are missing; `rolltape export` has them from the run")
    if not as_json and tally.launch is not None:
        print_report(tally, run, settings.step, whole=whole)
    if not whole:
        return Exit.INTERRUPTED
    if tally.failed:
        return Exit.FAILED
    return Exit.OUTPUT if told.lost or (records is not None and records.lost) else Exit.OK


class _Watched:
    """Hands on what a collector tells: to the tally, to the file of records, and to whoever listens."""

    def __init__(self, collector: Collector, tally: Tally, told: Telling, records: RecordFile | None) -> None:
        self._collector = collector
        self._tally = tally
        self._told = told
        self._records = records

    def launched(self, launch: Launch) -> None:
        self._tally.launched(launch)
        self._told.launched(launch)

    def results(self, results: Sequence[Result]) -> None:
        self._tally.add(results)
        for result in results:
            if self._records is not None and result.record is not None:
                self._records.add(result.record)
        self._told.ended(results)

    async def progress(self) -> None:
        """Say where it stands, again and again."""
        while True:
            await asyncio.sleep(self._told.every_s)
            if self._tally.launch is not None:
                self._told.progress(self._tally.figures(self._collector.in_flight))

    def over(self, *, whole: bool) -> None:
        endings = [
            {"status": status, "reason": reason, "rollouts": one.count, "mean_reward": one.rewards.mean}
            for (status, reason), one in self._tally.endings.items()
        ]
        self._told.over(self._tally.figures(), {"rollouts": self._tally.rollouts, "endings": endings, "whole": whole})


async def _run(collector: Collector, watched: _Watched, told: Telling) -> bool:
    """Collect until all is done, or somebody says that it is enough; whether all is done."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    signals = 0

    def end() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            main.cancel()
        else:
            told.ending(collector.settings.grace_s)
            collector.end()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, end)
    with told:
        said = asyncio.ensure_future(watched.progress())
        try:
            await collector.run(watched.launched, watched.results)
        except asyncio.CancelledError:
            if not signals:
                raise
        finally:
            said.cancel()
        watched.over(whole=signals == 0)
    return signals == 0


def _opened(out: Path, source: str) -> RecordFile:
    if out.exists() and Path(source).exists() and out.samefile(source):
        raise ExportError(f"-o {out}: that is the file of the tasks; name another for the records")
    try:
        return RecordFile(out, note)
    except OSError as error:
        raise ExportError(f"-o {out}: it cannot be written: {error.strerror}") from None
