"""TensorBoard: metrics of each step, and its traces as text, in event files of a folder."""

import os
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Unpack
from urllib.parse import quote

from rolltape.errors import SinkError
from rolltape.records.trace import Trace
from rolltape.tracking.sinks import Outbox, OutboxOptions, import_package
from rolltape.tracking.summary import ShownStep, step_metrics, steps_in
from rolltape.tracking.traces import trace_metadata, trace_text

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


def tensorboard_sink(
    directory: str | os.PathLike[str], *, name: str | None = None, **options: Unpack[OutboxOptions]
) -> Outbox:
    """A sink that writes event files into a folder, or into its sub-folder `name`: a run on TensorBoard's page.

    Example:

        with rolltape.tensorboard_sink("logs", name="exp1") as sink:
            rolltape.show_step(sink, run, step=3)
    """
    return Outbox(TensorboardTracker(directory, name), **options)


class TensorboardTracker:
    """Writes each step as one event, which a reader sees whole or not at all."""

    def __init__(self, directory: str | os.PathLike[str], name: str | None = None) -> None:
        import_package("tensorboard", extra="tensorboard")
        self._folder = Path(directory) if name is None else Path(directory) / quote(name, safe=" ")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._held = steps_in(_stored_metrics(self._folder))
        except OSError as error:
            raise SinkError(f"{self._folder}: {error.strerror or error}; give a folder that can be written") from None

    @cached_property
    def _writer(self) -> "EventFileWriter":
        """The writer of this process, with its own file, made at the first write."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(str(self._folder))

    def holds(self, split: str, step: int) -> bool:
        return (split, step) in self._held

    def put(self, shown: ShownStep) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        values = [Summary.Value(tag=name, simple_value=value) for name, value in step_metrics(shown).items()]
        for place, trace in enumerate(shown.traces):
            values += text_pb(f"{shown.split}/traces/{place}", _markdown(shown, trace)).value
        event = Event(wall_time=time.time(), step=shown.step, summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        if "_writer" in self.__dict__:
            self._writer.close()


def _markdown(shown: ShownStep, trace: Trace) -> str:
    """A trace for TensorBoard's text page: metadata, then the conversation as it is."""
    about = [f"- {name}: {value}" for name, value in trace_metadata(shown, trace).items()]
    indented = "\n".join(f"    {line}" for line in trace_text(trace).splitlines())
    return "\n".join(about) + "\n\n" + indented


def _stored_metrics(folder: Path) -> Iterator[tuple[str, int]]:
    """The metrics in the event files of a folder, by name, with their steps."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for file in sorted(folder.glob("*tfevents*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                yield value.tag, event.step
