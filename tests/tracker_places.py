"""The trackers as tests see them: where to push to, and what each holds afterwards, read back by its own API."""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from otlp_receiver import Receiver, attributes, otlp_receiver
from rolltape.tracking import Outbox
from tracked import stored_metrics, stored_traces

Figures = dict[tuple[str, int], float]  # by name and step


class HeldRollout(NamedTuple):
    """A rollout as a tracker has it."""

    rollout: str
    reward: float
    page: str | None


class Place(Protocol):
    """A tracker that can be pushed to, and read."""

    to: str  # as `--to` has it

    def sink(self, **options: Any) -> Any:
        """A sink into a run of its own, which is called exp."""
        ...

    def figures(self) -> Figures:
        """All metrics; fails if one is held twice."""
        ...

    def rollouts(self) -> list[HeldRollout]:
        """All rollouts that are shown, as often as they are held."""
        ...


@contextmanager
def patient(sink: Outbox) -> Iterator[Outbox]:
    """The sink, closed at the end, however long the tracker takes on a busy machine."""
    try:
        yield sink
    finally:
        sink.close(timeout_s=600)


def once(entries: list[tuple[tuple[str, int], float]]) -> Figures:
    doubled = [key for key, count in Counter(key for key, _ in entries).items() if count > 1]
    assert not doubled
    return dict(entries)


class Wandb:
    """Offline runs, read by `wandb leet inspect`."""

    def __init__(self, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._project = project
        self.to = f"wandb:{project}"
        monkeypatch.setenv("WANDB_MODE", "offline")

    def sink(self, **options: Any) -> Any:
        from rolltape.tracking import wandb_sink

        return wandb_sink(project=self._project, name="exp", **options)

    def folders(self) -> list[Path]:
        from rolltape.tracking.wandb import run_id

        return sorted(Path(os.environ["WANDB_DIR"]).glob(f"wandb/offline-run-*-{run_id(self._project, 'exp')}"))

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for folder in self.folders():
            command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            records = [json.loads(line) for line in printed.splitlines()]
            found += [record["history"]["item"] for record in records if record["type"] == "history"]
        return found

    def figures(self) -> Figures:
        return once(
            [
                ((name, row["rolltape/step"]), float(value))
                for row in self.rows()
                for name, value in row.items()
                if name.startswith(("train/", "test/")) and "/traces" not in name
            ]
        )

    def rollouts(self) -> list[HeldRollout]:
        held = []
        for file in [file for folder in self.folders() for file in folder.glob("files/media/table/**/*.table.json")]:
            table = json.loads(file.read_text())
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
            held += [HeldRollout(row["rollout"], row["reward"], row["page"]) for row in rows]
        return held


class Mlflow:
    """A database in a file, read by MLflow's client."""

    to = "mlflow:sums"

    def __init__(self, folder: Path, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copy(empty, folder / "mlflow.db")
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", self.uri)
        monkeypatch.chdir(folder)  # where MLflow makes a folder for artifacts

    @staticmethod
    def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A database with MLflow's tables, which take it seconds to make: once for all workers."""
        from mlflow import MlflowClient

        base = tmp_path_factory.getbasetemp()
        shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        made = shared / "mlflow-empty.db"
        with (shared / "mlflow-empty.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                fresh = shared / "mlflow-fresh.db"
                MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments()
                fresh.rename(made)
        return made

    def sink(self, **options: Any) -> Any:
        from rolltape.tracking import mlflow_sink

        return mlflow_sink(experiment="sums", name="exp", **options)

    def runs(self) -> list[Any]:
        return list(self._client().search_runs([self._experiment()]))

    def figures(self) -> Figures:
        client = self._client()
        return once(
            [
                ((one.key, one.step), one.value)
                for run in self.runs()
                for name in run.data.metrics
                for one in client.get_metric_history(run.info.run_id, name)
            ]
        )

    def traces(self) -> list[Any]:
        return list(self._client().search_traces(locations=[self._experiment()]))

    def rollouts(self) -> list[HeldRollout]:
        held = []
        for trace in self.traces():
            about = trace.info.trace_metadata
            (reward,) = [one.value for one in trace.info.assessments if one.name == "reward"]
            held.append(HeldRollout(about["rolltape.rollout"], reward, about.get("rolltape.page")))
        return held

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    def _experiment(self) -> str:
        return str(self._client().get_experiment_by_name("sums").experiment_id)


class Otel:
    """A receiver of OTLP."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.to = f"otel:{receiver.url}"

    def sink(self, **options: Any) -> Any:
        from rolltape.tracking import otel_sink

        return otel_sink(self.receiver.url, name="exp", **options)

    def figures(self) -> Figures:
        steps = [attributes(span) for span in self.receiver.spans if span.name.startswith("step ")]
        return once(
            [
                ((name, step["rolltape.step"]), float(value))
                for step in steps
                for name, value in step.items()
                if not name.startswith("rolltape.")
            ]
        )

    def rollouts(self) -> list[HeldRollout]:
        spans = [attributes(span) for span in self.receiver.spans if span.name.startswith("invoke_agent")]
        return [HeldRollout(one["rolltape.rollout"], one["rolltape.reward"], one.get("rolltape.page")) for one in spans]


class Tensorboard:
    """Event files, read as TensorBoard's page reads them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "logs"
        self.to = f"tensorboard:{self._folder}"

    def sink(self, **options: Any) -> Any:
        from rolltape.tracking import tensorboard_sink

        return tensorboard_sink(self._folder, name="exp", **options)

    def figures(self) -> Figures:
        events = self._events()
        return once(
            [((name, one.step), one.value) for name in events.Tags()["scalars"] for one in events.Scalars(name)]
        )

    def rollouts(self) -> list[HeldRollout]:
        events, held = self._events(), []
        for tag in events.Tags()["tensors"]:
            for tensor in events.Tensors(tag):
                text = tensor.tensor_proto.string_val[0].decode()
                about = dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("- "))
                held.append(HeldRollout(about["rollout"], float(about["reward"]), about.get("page")))
        return held

    def _events(self) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        everything = {"scalars": 0, "tensors": 0}
        return EventAccumulator(str(self._folder / "exp"), size_guidance=everything).Reload()


class Trackio:
    """A project of trackio, read from its database."""

    def __init__(self, project: str) -> None:
        self._project = project
        self.to = f"trackio:{project}"

    def sink(self, **options: Any) -> Any:
        from rolltape.tracking import trackio_sink

        return trackio_sink(project=self._project, name="exp", **options)

    def figures(self) -> Figures:
        return once(
            [
                ((name, entry["step"]), value)
                for entry in stored_metrics(self._project)
                for name, value in entry.items()
                if isinstance(value, int | float) and name.startswith(("train/", "test/"))
            ]
        )

    def rollouts(self) -> list[HeldRollout]:
        held = [trace["metadata"] for trace in stored_traces(self._project)]
        return [HeldRollout(one["rollout"], one["reward"], one.get("page")) for one in held]


TRACKERS = [
    pytest.param("wandb", marks=pytest.mark.slow),
    pytest.param("mlflow", marks=pytest.mark.slow),
    "otel",
    "tensorboard",
    "trackio",
]


@contextmanager
def open_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Wandb | Mlflow | Otel | Tensorboard | Trackio]:
    """An empty place on the tracker that a test is run with."""
    name = str(request.node.name).replace("[", "-").replace("]", "")[-40:]
    match request.param:
        case "wandb":
            yield Wandb(name, monkeypatch)
        case "mlflow":
            yield Mlflow(tmp_path, request.getfixturevalue("empty_database"), monkeypatch)
        case "otel":
            with otlp_receiver() as receiver:
                yield Otel(receiver)
        case "tensorboard":
            yield Tensorboard(tmp_path)
        case _:
            yield Trackio(name)


def same(left: Figures, right: Figures) -> bool:
    """Whether the figures are equal, as float32 has them: TensorBoard keeps no more. NaN equals NaN."""
    return left.keys() == right.keys() and all(
        math.isclose(value, right[key], rel_tol=1e-6) or (math.isnan(value) and math.isnan(right[key]))
        for key, value in left.items()
    )
