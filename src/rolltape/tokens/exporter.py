"""`TokenExporter`, which a trainer calls for each micro-batch and at the end of each step."""

import atexit
import operator
import os
from collections.abc import Mapping
from typing import Any, Final, Self, SupportsIndex

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError("rolltape.tokens.TokenExporter needs torch; install rolltape[torch], or torch itself") from error

from rolltape.errors import RecordError
from rolltape.tokens.losses import LossSpec
from rolltape.tokens.micro_batch import parse_micro_batch
from rolltape.tokens.parquet import write_parquet
from rolltape.tokens.pipeline import Pipeline
from rolltape.tokens.primerl import write_lines
from rolltape.tokens.rank_files import RankFiles
from rolltape.tokens.report import ExportReport, Reporter
from rolltape.tokens.snapshot import DeviceSnapshotter, plan_layout
from rolltape.tokens.steps import Format, token_folder

_BYTES_PER_TOKEN = 72  # with all possible columns
_REHEARSED = (
    *("input_ids", "trained_mask", "inference_logprobs", "advantages", "reference_logprobs", "logprobs"),
    *("ref_kl_weights", "ce_weights"),
)


class _Configured:
    """The default of `export(loss=…)`: the loss that the exporter was made with."""


CONFIGURED: Final = _Configured()


class TokenExporter:
    """Writes what a trainer saw, token by token, without delaying it. Each rank makes one and uses it on one thread.

    Make it before the first training step:

        with TokenExporter("runs/exp1", rank=rank, world_size=world_size, loss=PpoClip()) as exporter:
            for step, micro_batches in enumerate(training):
                for micro_step, batch in enumerate(micro_batches):
                    outputs = train(batch)  # {"logprobs": …, "entropy": …}
                    exporter.export(step, micro_step, batch, outputs)
                exporter.mark_stable(step)

    Wrong arguments raise at once. Failures of the disk or of the background threads never raise; they are logged once,
    and again by `close`.
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
        """Export to `run`, a directory.

        `loss` computes which tokens are masked. `sample_fraction` and `every_n_steps` limit what is written. With
        context parallelism, only the first rank of a group writes, and it must get whole sequences. At most
        `max_queued_bytes` wait for the disk. A micro-batch that does not fit is dropped and counted.
        """
        chosen = _checked_format(file_format)
        rank, world_size = _whole(rank, "rank"), _whole(world_size, "world_size")
        context_parallel_rank = _whole(context_parallel_rank, "context_parallel_rank")
        context_parallel_size = _whole(context_parallel_size, "context_parallel_size")
        _check(0 <= rank < world_size, f"rank {rank} of {world_size}: ranks are 0 to world_size - 1")
        _check(0 <= sample_fraction <= 1, f"sample_fraction is {sample_fraction}; give 0 to 1")
        _check(every_n_steps >= 1, f"every_n_steps is {every_n_steps}; give 1 or more")
        _check(threads >= 1 and max_queued_bytes >= 1, "threads and max_queued_bytes are 1 or more")
        _check(
            0 <= context_parallel_rank < context_parallel_size and world_size % context_parallel_size == 0,
            f"context-parallel rank {context_parallel_rank} of {context_parallel_size} in a world of {world_size}",
        )
        self.loss = loss
        self._every_n_steps = every_n_steps
        self._context_parallel_size = context_parallel_size
        self._reporter = Reporter(f"token export of rank {rank}")
        self._snapshotter = DeviceSnapshotter()
        self._closed = False
        self._process = os.getpid()
        self._pipeline: Pipeline | None = None
        self._is_covered = context_parallel_rank > 0  # the first rank of its group has the whole sequences
        folder = token_folder(run, chosen)
        if self._is_covered:
            return
        writers = world_size // context_parallel_size
        files = RankFiles(folder, chosen, rank=rank, world_size=world_size, writers=writers, fraction=sample_fraction)
        try:
            files.announce()
        except OSError as error:
            self._reporter.problem("files", str(error))
        self._pipeline = Pipeline(
            files,
            self._snapshotter,
            write_parquet if chosen is Format.PARQUET else write_lines,
            self._reporter,
            threads=threads,
            max_queued_bytes=max_queued_bytes,
        )
        atexit.register(self.close)

    def reserve(self, tokens: int, device: torch.device | str = "cpu", in_flight: int = 4) -> None:
        """Prepare for micro-batches of `tokens` tokens, so that the first one is as fast as the others.

        `in_flight`: how many micro-batches the caller may export before the device has caught up.
        """
        if self._pipeline is None:
            return
        self._snapshotter.reserve(tokens * _BYTES_PER_TOKEN, torch.device(device), in_flight)
        # The device loads its kernels at first use, and so do the libraries that encode. Some of them block all threads
        # in that time.
        ones = dict.fromkeys(_REHEARSED, torch.ones(8, device=device))
        rehearsed = parse_micro_batch(0, 0, {**ones, "lengths": [8]}, ones, self.loss)
        self._pipeline.rehearse(self._snapshotter.snapshot(rehearsed, plan_layout(rehearsed)))

    def export(
        self,
        step: SupportsIndex,
        micro_step: SupportsIndex,
        batch: Mapping[str, Any] | None,
        outputs: Mapping[str, Any],
        *,
        loss: LossSpec | _Configured | None = CONFIGURED,
        epoch: SupportsIndex = 0,
    ) -> None:
        """Export a micro-batch and the model's outputs for it, as they are now.

        docs/how-to/train/tokens.md lists the columns.

        Give `loss` if this micro-batch trains with another loss than the exporter's, and `epoch` if the step trains
        more than once on its samples.
        """
        pipeline, step, micro_step = self._running(), _whole(step, "step"), _whole(micro_step, "micro_step")
        epoch = _whole(epoch, "epoch")
        if pipeline is None or step % self._every_n_steps:
            return
        if batch is None or not len(batch.keys()):  # bool() of a TensorDict does not tell whether it is empty
            self._reporter.count(empty_batches=1)
            return
        parsed = parse_micro_batch(
            step,
            micro_step,
            batch,
            outputs,
            self.loss if isinstance(loss, _Configured) else loss,
            epoch=epoch,
            context_parallel_size=self._context_parallel_size,
        )
        if not parsed.tokens:
            self._reporter.count(empty_batches=1)
            return
        layout = plan_layout(parsed)
        snapshotter = self._snapshotter
        pipeline.submit(step, layout.total_bytes, parsed.sequences, lambda: snapshotter.snapshot(parsed, layout))

    def mark_stable(self, step: SupportsIndex, *, wait: bool = False, timeout_s: float = 60.0) -> bool:
        """Declare that this rank has exported all of a step. The step is stable once all ranks did this and wrote it.

        It returns at once, and the records are written in the background. If the process is killed before that, the
        step is lost and has no marker. With `wait` it returns once this rank's records and its marker are on disk, so
        that the end of the process cannot lose them:

            assert exporter.mark_stable(step, wait=True)
            save_checkpoint(step)

        Returns True if all of this rank's records of the step are known to be on disk. False means that `wait` is not
        set, that they were not there after `timeout_s`, or that some were dropped or lost; `report` has the counts.
        """
        pipeline, step = self._running(), _whole(step, "step")
        if pipeline is None:
            return self._is_covered
        if step % self._every_n_steps:
            return True
        mark = pipeline.finish(step)
        return pipeline.wait(mark, timeout_s) if wait else False

    def report(self) -> ExportReport:
        """The counts so far."""
        return self._reporter.report()

    def close(self, timeout_s: float = 60.0) -> ExportReport:
        """Write what waits, for at most `timeout_s`, and report what could not be written."""
        if self._closed or self._pipeline is None or self._process != os.getpid():
            return self._reporter.report()
        self._closed = True
        atexit.unregister(self.close)
        self._pipeline.close(timeout_s)
        return self._reporter.close()

    def _running(self) -> Pipeline | None:
        """The pipeline that takes micro-batches, or None if this process has none or it is closed."""
        if self._pipeline is not None and self._process != os.getpid():
            # A forked child has no threads, and locks in any state.
            self._pipeline, self._reporter = None, Reporter(self._reporter.who)
            self._reporter.problem("fork", "it was made before this process was forked; make one in each process")
        return None if self._closed else self._pipeline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(number: SupportsIndex, name: str) -> int:
    """A whole number, which may be a scalar of numpy or torch."""
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
        raise RecordError(f"file_format is {file_format!r}; give {' or '.join(Format)}") from None


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RecordError(message)
