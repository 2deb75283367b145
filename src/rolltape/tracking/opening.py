"""The trackers: their sinks for Python, and how each is opened from a text such as `wandb:PROJECT`."""

from collections.abc import Callable
from pathlib import Path

from rolltape.errors import UsageError
from rolltape.tracking.jsonl import JsonlTracker, jsonl_sink
from rolltape.tracking.mlflow import MlflowTracker, mlflow_sink
from rolltape.tracking.otel import OtelTracker, otel_sink
from rolltape.tracking.sinks import Tracker
from rolltape.tracking.tensorboard import TensorboardTracker, tensorboard_sink
from rolltape.tracking.trackio import LocalTracker, trackio_sink
from rolltape.tracking.wandb import WandbTracker, wandb_sink

# `rolltape.tracking` exports these.
__all__ = ["jsonl_sink", "mlflow_sink", "otel_sink", "tensorboard_sink", "trackio_sink", "wandb_sink"]

# By kind: the name of its place, and how to open it there, given the run's name and a folder for its records.
_KINDS: dict[str, tuple[str, Callable[[str, str, Path], Tracker]]] = {
    "wandb": ("PROJECT", lambda project, name, memory: WandbTracker(project, name)),
    "mlflow": ("EXPERIMENT", lambda experiment, name, memory: MlflowTracker(experiment, name)),
    "otel": ("URL", lambda url, name, memory: OtelTracker(url, name, memory / "sent-by-otlp.jsonl")),
    "tensorboard": ("DIR", lambda directory, name, memory: TensorboardTracker(directory, name)),
    "trackio": ("PROJECT", lambda project, name, memory: LocalTracker(project, name)),
}
FORMS = ", ".join(f"{kind}:{place}" for kind, (place, _) in _KINDS.items()) + ", or a file ending in .jsonl"


def open_tracker(to: str, *, name: str, memory: Path) -> Tracker:
    """Open the tracker that `to` names. `name` is the run's name there.

    `memory` is a folder for records of what was sent, for trackers that cannot be queried.
    """
    kind, colon, place = to.partition(":")
    if not colon and to.endswith(".jsonl"):
        return JsonlTracker(to)
    if kind not in _KINDS:
        raise UsageError(f"--to {to}: unknown tracker; use {FORMS}")
    if not place:
        raise UsageError(f"--to {to}: it names no place; use {FORMS}")
    return _KINDS[kind][1](place, name, memory)
