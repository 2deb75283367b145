"""MLflow: metrics of each step, and its rollouts as traces with turns and tools as spans and the reward as feedback."""

import json
import math
import os
import re
import time
from posixpath import normpath
from typing import TYPE_CHECKING, Any, Unpack

from rolltape.errors import SinkError
from rolltape.records.ids import digest_of
from rolltape.records.rollout import Status
from rolltape.records.trace import Trace
from rolltape.tracking.sinks import Outbox, OutboxOptions, import_package
from rolltape.tracking.summary import ShownStep, parse_count_metric, step_metrics, steps_in
from rolltape.tracking.traces import trace_metadata, trace_scores

if TYPE_CHECKING:
    from mlflow.entities import Assessment
    from mlflow.entities import Run as MlflowRun
    from opentelemetry.sdk.trace import ReadableSpan

_KEY_TAG = "rolltape.key"  # the tag to find a run by
_MOST_METRICS = 1000  # limit of one request
_LONGEST_VALUE = 8000  # characters of a trace's metadata
# Without these, it sends telemetry, and fetches prices of models from the network when it stores a span.
_STAYS_HERE = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_MODEL_CATALOG_URI": ""}
# Parts of mlflow that its documentation does not list. Its public functions would log to the current address of this
# process, with their own trace ids.
_PRIVATE = {"mlflow.tracing.client": ("TracingClient.start_trace", "TracingClient.log_spans")}


def mlflow_sink(
    *,
    experiment: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    tracking_uri: str | None = None,
    **options: Unpack[OutboxOptions],
) -> Outbox:
    """A sink into the MLflow run `run_id`, by default the caller's active run; with `experiment`, into a separate run.

    `tracking_uri` is MLflow's address, by default the current one. A separate run continues a run of the same name.

    Example:

        with rolltape.mlflow_sink(experiment="sums", name="exp1") as sink:
            rolltape.show_step(sink, run, step=3)
    """
    if experiment is not None and run_id is not None:
        raise SinkError(f"mlflow: both run {run_id} and the experiment {experiment!r} are given; give one of them")
    if experiment is not None:
        return Outbox(MlflowTracker(experiment, name or "rolltape", tracking_uri), **options)
    return Outbox(MlflowRunTracker(run_id or _active_run(), tracking_uri), **options)


class MlflowRunTracker:
    """A run that the caller started and will end."""

    def __init__(self, run_id: str, tracking_uri: str | None = None) -> None:
        _import_mlflow()
        from mlflow import MlflowClient
        from mlflow.tracing.client import TracingClient

        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._traces = TracingClient(tracking_uri)
        self._run = self._client.get_run(run_id)

    def holds(self, split: str, step: int) -> bool:
        """Always False: the caller owns the run."""
        return False

    def put(self, shown: ShownStep) -> None:
        """Log the traces of a step, then its metrics, so that a step with metrics is complete."""
        from mlflow.entities import Metric

        for trace in shown.traces:
            self._put_trace(shown, trace)
        now = int(time.time() * 1000)
        # The metric that identifies a complete step comes last.
        named = sorted(step_metrics(shown).items(), key=lambda one: parse_count_metric(one[0]) is not None)
        metrics = [Metric(_metric_name(name), value, now, shown.step) for name, value in named]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run.info.run_id, metrics=metrics[start : start + _MOST_METRICS])

    def close(self) -> None:
        """Do nothing: the run is the caller's."""

    def _put_trace(self, shown: ShownStep, trace: Trace) -> None:
        """Log a rollout under an id that follows from it. If it is logged again, it replaces itself."""
        from mlflow.entities import TraceInfo, TraceLocation, TraceState
        from opentelemetry.sdk.resources import Resource

        from rolltape.tracking.genai import rollout_spans

        spans = rollout_spans(shown, trace, Resource({"service.name": "rolltape"}), self._run.info.run_id)
        root = spans[0]
        assert root.context is not None
        assert root.start_time is not None
        assert root.end_time is not None
        trace_id = f"tr-{root.context.trace_id:032x}"
        experiment = self._run.info.experiment_id
        about = {f"rolltape.{name}": _text(value) for name, value in trace_metadata(shown, trace).items()}
        self._traces.start_trace(
            TraceInfo(
                trace_id=trace_id,
                trace_location=TraceLocation.from_experiment_id(experiment),
                request_time=root.start_time // 1_000_000,
                execution_duration=(root.end_time - root.start_time) // 1_000_000,
                state=TraceState.ERROR if trace.status is Status.FAILED else TraceState.OK,
                client_request_id=f"{trace.rollout}.{trace.try_index}",
                request_preview=_attribute(root, "gen_ai.input.messages"),
                response_preview=_attribute(root, "gen_ai.output.messages"),
                trace_metadata={**about, "mlflow.sourceRun": self._run.info.run_id},
                tags={"mlflow.traceName": root.name},
                assessments=_assessments(trace, trace_id),
            )
        )
        self._traces.log_spans(experiment, [_mlflow_span(span, trace_id) for span in spans])


class MlflowTracker(MlflowRunTracker):
    """A run of an experiment, found again by its name."""

    def __init__(self, experiment: str, name: str, tracking_uri: str | None = None) -> None:
        _import_mlflow()
        from mlflow.exceptions import MlflowException

        try:
            super().__init__(_own_run(experiment, name, tracking_uri).info.run_id, tracking_uri)
            self._held = self._stored_steps()
        except (MlflowException, ImportError, OSError) as error:
            raise SinkError(f"mlflow: experiment {experiment!r} cannot be opened: {error}") from error

    def holds(self, split: str, step: int) -> bool:
        return (split, step) in self._held

    def close(self) -> None:
        self._client.set_terminated(self._run.info.run_id)

    def _stored_steps(self) -> set[tuple[str, int]]:
        counts = [name for name in self._run.data.metrics if parse_count_metric(name) is not None]
        return steps_in(
            (name, one.step) for name in counts for one in self._client.get_metric_history(self._run.info.run_id, name)
        )


def _own_run(experiment: str, name: str, tracking_uri: str | None) -> "MlflowRun":
    """The run of that name. It is made if there is none."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=tracking_uri)
    there = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if there is None else there.experiment_id
    key = digest_of("mlflow", name).hex()  # some names cannot be written in a filter
    for run in client.search_runs([experiment_id], f"tags.`{_KEY_TAG}` = '{key}'", max_results=1):
        client.update_run(run.info.run_id, status="RUNNING")
        return run
    return client.create_run(experiment_id, run_name=name, tags={_KEY_TAG: key})


def _active_run() -> str:
    """The run that `mlflow.log_metric` would log into here."""
    _import_mlflow()
    import mlflow

    run = mlflow.active_run()
    if run is None:
        raise SinkError("mlflow has no active run here; call mlflow.start_run first, or give a run_id or an experiment")
    return str(run.info.run_id)


def _mlflow_span(span: "ReadableSpan", trace_id: str) -> Any:
    """A span as MLflow stores it: attributes are JSON, and one of them is the trace id."""
    from mlflow.entities import Span
    from opentelemetry.sdk.trace import ReadableSpan

    attributes = {name: json.dumps(value) for name, value in (span.attributes or {}).items()}
    return Span(
        ReadableSpan(
            span.name,
            context=span.context,
            parent=span.parent,
            resource=span.resource,
            attributes={**attributes, "mlflow.traceRequestId": json.dumps(trace_id)},
            kind=span.kind,
            status=span.status,
            start_time=span.start_time,
            end_time=span.end_time,
            events=span.events,
        )
    )


def _assessments(trace: Trace, trace_id: str) -> "list[Assessment]":
    """The reward and its terms as feedback. A value that is not finite becomes text: MLflow's JSON cannot hold it."""
    from mlflow.entities import AssessmentSource, Feedback

    source = AssessmentSource(source_type="CODE", source_id="rolltape")
    found: list[Assessment] = []
    for name, score in trace_scores(trace).items():
        value = score if math.isfinite(score) else str(score)
        feedback = Feedback(name=name, value=value, source=source, trace_id=trace_id)
        feedback.assessment_id = f"a-{trace_id}-{name}"
        found.append(feedback)
    return found


def _metric_name(name: str) -> str:
    """The name without characters that MLflow refuses. A reward term may have any name."""
    return normpath(re.sub(r"[^/\w.\- :]", "_", name))


def _attribute(span: "ReadableSpan", name: str) -> str | None:
    value = (span.attributes or {}).get(name)
    return None if value is None else str(value)[:_LONGEST_VALUE]


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:_LONGEST_VALUE]


def _import_mlflow() -> None:
    """Import mlflow without requests to other machines, and check that it has the parts that are used here."""
    for variable, value in _STAYS_HERE.items():
        os.environ.setdefault(variable, value)
    import_package("mlflow", extra="mlflow", private=_PRIVATE)
