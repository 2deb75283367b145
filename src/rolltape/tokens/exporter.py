"""The exporter that a trainer calls: one micro-batch at a time, and when a step is over."""

import atexit
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex

import torch

from rolltape.errors import RecordError
from rolltape.tokens.intake import taken
from rolltape.tokens.layout import layout_of
from rolltape.tokens.losses import LossSpec
from rolltape.tokens.parquet import write_parquet
from rolltape.tokens.pipeline import Pipeline
from rolltape.tokens.primerl import write_lines
from rolltape.tokens.rankfiles import RankFiles
from rolltape.tokens.report import ExportReport, Reporter
from rolltape.tokens.snapshot import Camera
from rolltape.tokens.steps import Format

_BYTES_PER_TOKEN = 72  # with every column that there can be
_REHEARSED = ("input_ids", "trained_mask", "inference_logprobs", "advantages", "reference_logprobs", "logprobs")


class _Configured:
    """Stands for the loss that the exporter was made with."""


CONFIGURED: Final = _Configured()


class TokenExporter:
    """Writes what a trainer saw, token by token, without holding it up. For one thread of one rank.

    Make it before the first training step. A mistake in what is handed over raises at once; what the disk or the
    background threads do wrong is logged once, and again by `close`, and never raises.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        rank: SupportsIndex,
        world_size: SupportsIndex,
        loss: LossSpec | None = None,
        file_format: Format | str = Format.PARQUET,
        sample_fraction: float = 1.0,
        every_n_steps: int = 1,
        context_parallel_rank: SupportsIndex = 0,
        context_parallel_size: SupportsIndex = 1,
        threads: int = 4,
        max_queued_bytes: int = 1 << 30,
    ) -> None:
        chosen = _checked_format(file_format)
        rank, world_size = _whole(rank, "rank"), _whole(world_size, "world_size")
        context_parallel_rank = _whole(context_parallel_rank, "context_parallel_rank")
        context_parallel_size = _whole(context_parallel_size, "context_parallel_size")
        _check(0 <= rank < world_size, f"rank {rank} of {world_size}: ranks are 0 to world_size - 1")
        _check(0 <= sample_fraction <= 1, f"sample_fraction is {sample_fraction}; give 0 to 1")
        _check("://" not in os.fspath(run), f"run {os.fspath(run)}: token records are written to a path, not to a URL")
        _check(every_n_steps >= 1, f"every_n_steps is {every_n_steps}; give 1 or more")
        _check(threads >= 1 and max_queued_bytes >= 1, "threads and max_queued_bytes are 1 or more")
        _check(
            0 <= context_parallel_rank < context_parallel_size and world_size % context_parallel_size == 0,
            f"context-parallel rank {context_parallel_rank} of {context_parallel_size} in a world of {world_size}",
        )
        self.loss = loss
        self._every_n_steps = every_n_steps
        self._reporter = Reporter(f"token export of rank {rank}")
        self._camera = Camera()
        self._closed = False
        self._process = os.getpid()
        self._pipeline: Pipeline | None = None
        if context_parallel_rank:
            return  # the first of its group has the whole sequences
        files = RankFiles(
            Path(run).expanduser().absolute() / chosen.folder,
            chosen,
            rank=rank,
            world_size=world_size,
            writers=world_size // context_parallel_size,
        )
        try:
            files.announce()
        except OSError as error:
            self._reporter.problem("files", str(error))
        self._pipeline = Pipeline(
            files,
            self._camera,
            write_parquet if chosen is Format.PARQUET else write_lines,
            self._reporter,
            rank=rank,
            fraction=sample_fraction,
            threads=threads,
            max_queued_bytes=max_queued_bytes,
        )
        atexit.register(self.close)

    def reserve(self, tokens: int, device: torch.device | str = "cpu", in_flight: int = 4) -> None:
        """Get ready for micro-batches of so many tokens, so that the first of them is as quick as the rest.

        `in_flight`: how many of them the caller may hand over before the device has caught up.
        """
        if self._pipeline is None:
            return
        self._camera.reserve(tokens * _BYTES_PER_TOKEN, torch.device(device), in_flight)
        # The device loads what it has to run when that is first used, and so do the libraries that encode, some of
        # which would hold up every thread meanwhile.
        nothing = dict.fromkeys(_REHEARSED, torch.ones(8, device=device))
        rehearsed = taken(0, 0, {**nothing, "lengths": [8]}, nothing, self.loss)
        self._pipeline.rehearse(self._camera.snapshot(rehearsed, layout_of(rehearsed)))

    def export(
        self,
        step: SupportsIndex,
        micro_step: SupportsIndex,
        batch: Mapping[str, Any] | None,
        outputs: Mapping[str, Any],
        *,
        loss: LossSpec | _Configured | None = CONFIGURED,
    ) -> None:
        """Take a micro-batch and what the model made of it, as they are now. `loss`: if it trains with another one."""
        pipeline, step, micro_step = self._running(), _whole(step, "step"), _whole(micro_step, "micro_step")
        if pipeline is None or step % self._every_n_steps:
            return
        if batch is None or not len(batch.keys()):  # a TensorDict says otherwise what is empty
            self._reporter.count(empty_batches=1)
            return
        intake = taken(step, micro_step, batch, outputs, self.loss if isinstance(loss, _Configured) else loss)
        if not intake.tokens:
            self._reporter.count(empty_batches=1)
            return
        layout = layout_of(intake)
        pipeline.submit(step, layout.total_bytes, intake.sequences, lambda: self._camera.snapshot(intake, layout))

    def mark_stable(self, step: SupportsIndex) -> None:
        """Say that this rank has exported all of a step. Once all ranks have, and it is written, the step is stable."""
        pipeline, step = self._running(), _whole(step, "step")
        if pipeline is not None and step % self._every_n_steps == 0:
            pipeline.finish(step)

    def report(self) -> ExportReport:
        """The counts so far."""
        return self._reporter.report()

    def close(self, timeout_s: float = 60.0) -> ExportReport:
        """Write what waits, for at most so long, and say what could not be written."""
        if self._closed or self._pipeline is None or self._process != os.getpid():
            return self._reporter.report()
        self._closed = True
        atexit.unregister(self.close)
        self._pipeline.close(timeout_s)
        return self._reporter.say_at_close()

    def _running(self) -> Pipeline | None:
        """What takes micro-batches; None: nothing does, here or any more."""
        if self._pipeline is not None and self._process != os.getpid():
            # A fork leaves the threads behind, and the locks as they happened to be.
            self._pipeline, self._reporter = None, Reporter(self._reporter.who)
            self._reporter.problem("fork", "it was made before this process was forked; make one in each process")
        return None if self._closed else self._pipeline

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whole(number: SupportsIndex, name: str) -> int:
    """A number that may have come as one of numpy or torch."""
    try:
        value = operator.index(number)
    except TypeError:
        raise RecordError(f"{name} is {number!r}; give a whole number") from None
    _check(value >= 0, f"{name} is {value}; give 0 or more")
    return value


def _checked_format(file_format: Format | str) -> Format:
    try:
        return Format(file_format)
    except ValueError:
        raise RecordError(f"file_format {file_format!r}: known are {', '.join(Format)}") from None


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise RecordError(what)
