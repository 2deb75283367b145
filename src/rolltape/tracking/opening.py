"""Open a tracker by how a user spells it: `wandb:PROJECT`, `mlflow:EXPERIMENT`, `otel:URL`, a file of JSON lines, …"""

from collections.abc import Callable
from pathlib import Path

from rolltape.errors import UsageError
from rolltape.tracking.sinks import Tracker


def open_tracker(to: str, *, name: str, memory: Path) -> Tracker:
    """Open the tracker that `to` spells; `name` is the run's name there.

    `memory` is a folder for a tracker that cannot be asked what it holds to remember what it was sent.
    """
    kind, colon, place = to.partition(":")
    if not colon and to.endswith(".jsonl"):
        from rolltape.tracking.jsonl import JsonlTracker

        return JsonlTracker(to)
    if kind not in _KINDS:
        raise UsageError(f"--to {to}: unknown tracker; use {FORMS}")
    if not place:
        raise UsageError(f"--to {to}: it names no place; use {FORMS}")
    return _KINDS[kind][1](place, name, memory)


def _wandb(project: str, name: str, memory: Path) -> Tracker:
    from rolltape.tracking.wandb import WandbTracker

    return WandbTracker(project, name)


def _mlflow(experiment: str, name: str, memory: Path) -> Tracker:
    from rolltape.tracking.mlflow import MlflowTracker

    return MlflowTracker(experiment, name)


def _otel(url: str, name: str, memory: Path) -> Tracker:
    from rolltape.tracking.otel import OtelTracker

    return OtelTracker(url, name, memory / "sent-by-otlp.jsonl")


def _tensorboard(directory: str, name: str, memory: Path) -> Tracker:
    from rolltape.tracking.tensorboard import TensorboardTracker

    return TensorboardTracker(directory, name)


def _trackio(project: str, name: str, memory: Path) -> Tracker:
    from rolltape.tracking.trackio import LocalTracker

    return LocalTracker(project, name)


# By kind: what its place is called, and how it is opened there.
_KINDS: dict[str, tuple[str, Callable[[str, str, Path], Tracker]]] = {
    "wandb": ("PROJECT", _wandb),
    "mlflow": ("EXPERIMENT", _mlflow),
    "otel": ("URL", _otel),
    "tensorboard": ("DIR", _tensorboard),
    "trackio": ("PROJECT", _trackio),
}
FORMS = ", ".join(f"{kind}:{place}" for kind, (place, _) in _KINDS.items()) + ", or a file ending in .jsonl"
