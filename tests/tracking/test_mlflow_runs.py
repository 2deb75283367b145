"""MLflow with a database in a file: traces, the caller's run, and a push that was cut short."""

from pathlib import Path
from typing import Any

import pytest

import rolltape
from commands import Cli
from rolltape.errors import SinkError
from rolltape.tracking import mlflow_sink, show_step
from tracked import record_steps
from tracker_places import Mlflow, patient

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    return Mlflow(tmp_path, Mlflow.empty_database(tmp_path_factory), monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_steps(tmp_path / "exp", steps=1, attempts=1)


def test_a_trace_has_turns_and_tools_as_spans_and_the_reward_as_feedback(place: Mlflow, run: Path) -> None:
    with patient(place.sink()) as sink:
        show_step(sink, rolltape.read(run), step=0)
    assert sink.delivery.complete
    (trace,) = place.traces()
    names = {span.span_id: span.name for span in trace.data.spans}
    assert [(names.get(span.parent_id), span.name, span.span_type) for span in trace.data.spans] == [
        (None, "invoke_agent chat", "AGENT"),
        ("invoke_agent chat", "chat tiny", "CHAT_MODEL"),
        ("chat tiny", "execute_tool bash", "TOOL"),
        ("invoke_agent chat", "chat tiny", "CHAT_MODEL"),
        ("invoke_agent chat", "chat tiny", "CHAT_MODEL"),
    ]
    tool = trace.data.spans[2]
    assert (tool.inputs, tool.outputs) == ({"command": "wc -l"}, "212 parser.py")
    assert [(one.name, one.value, one.source.source_id) for one in trace.info.assessments] == [
        ("reward", 0.0, "rolltape"),
        ("right", 0.0, "rolltape"),
    ]
    (mlflow_run,) = place.runs()
    assert trace.info.trace_metadata["mlflow.sourceRun"] == mlflow_run.info.run_id
    assert (mlflow_run.info.run_name, mlflow_run.info.status) == ("exp", "FINISHED")
    assert trace.info.execution_duration == 4000


def test_push_that_was_cut_short_between_traces_and_metrics_is_completed_and_doubles_nothing(
    place: Mlflow, run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(MlflowClient, "log_batch", killed)
        assert cli("push", run, "--to", place.to).code == 130
    assert len(place.traces()) == 1
    assert "2 steps and 2 traces pushed" in cli("push", run, "--to", place.to).out
    assert len(place.rollouts()) == 2
    assert [len(trace.data.spans) for trace in place.traces()] == [5, 5]
    assert place.figures()["train/rollouts/count", 0] == 1


def test_without_an_experiment_the_active_run_of_the_caller_is_used_and_left_open(place: Mlflow, run: Path) -> None:
    import mlflow

    mlflow.set_experiment("sums")
    with mlflow.start_run(run_name="training"):
        with patient(mlflow_sink()) as sink:
            show_step(sink, rolltape.read(run), step=0)
        assert sink.delivery.complete
        mlflow.log_metric("loss", 0.5)
        assert [one.info.status for one in place.runs()] == ["RUNNING"]
    (own,) = place.runs()
    assert {"loss", "train/reward/mean"} <= own.data.metrics.keys()
    assert len(place.rollouts()) == 1


def test_no_run_to_log_into_is_an_error_at_the_start(place: Mlflow) -> None:
    with pytest.raises(SinkError, match=r"mlflow has no active run here; call mlflow\.start_run first"):
        mlflow_sink()


def test_address_that_mlflow_cannot_open_is_one_line(
    place: Mlflow, run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "ftp://nowhere")
    refused = cli("push", run, "--to", "mlflow:sums")
    assert refused.code == 4
    assert "rolltape: mlflow: experiment 'sums' cannot be opened:" in refused.err


def test_mlflow_that_is_built_otherwise_is_named(
    place: Mlflow, run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("mlflow.tracing.client.TracingClient.log_spans")
    refused = cli("push", run, "--to", place.to)
    assert refused.code == 4
    assert "log_spans" in refused.err
    assert "does not fit this rolltape" in refused.err
