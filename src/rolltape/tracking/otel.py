"""OpenTelemetry: a span per step with its metrics, and spans of its rollouts, sent to a collector by OTLP over HTTP."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Unpack
from urllib.parse import urlsplit, urlunsplit

from rolltape.errors import SinkError
from rolltape.tracking.sinks import Outbox, OutboxOptions, import_package
from rolltape.tracking.summary import ShownStep

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_PATH = "/v1/traces"


def otel_sink(url: str, *, name: str, **options: Unpack[OutboxOptions]) -> Outbox:
    """A sink that sends spans to a collector. `name` is the run's name there.

    Headers, certificates and time limits are those of OpenTelemetry's environment variables, such as
    `OTEL_EXPORTER_OTLP_HEADERS`. Example:

        with rolltape.otel_sink("http://127.0.0.1:4318", name="exp1") as sink:
            rolltape.show_step(sink, run, step=3)
    """
    return Outbox(OtelTracker(url, name), **options)


class OtelTracker:
    """Sends each step in one request. A collector cannot be queried, so the file `sent` records what was sent.

    Without that file, a step is sent again, and its spans have the same ids.
    """

    def __init__(self, url: str, name: str, sent: Path | None = None) -> None:
        import_package(_EXPORTER, extra="otel")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._url = _traces_url(url)
        self._name = name
        # Resource attributes of the environment count. Most pages list the service name.
        given = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "rolltape", "rolltape.run": name}
        self._resource = Resource.create(given)
        self._exporter = OTLPSpanExporter(endpoint=self._url)
        self._sent = sent
        self._held = set() if sent is None else _read_sent(sent, self._key())

    def holds(self, split: str, step: int) -> bool:
        return (split, step) in self._held

    def put(self, shown: ShownStep) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._exporter.export(self._spans(shown)) is not SpanExportResult.SUCCESS:
            raise SinkError(
                f"{self._url}: step {shown.step} of {shown.split} was not taken; OpenTelemetry's own log says why, and "
                "pushing again sends what is missing"
            )
        if self._sent is not None and shown.summary is not None:
            with self._sent.open("ab") as file:
                file.write(json.dumps([*self._key(), shown.split, shown.step]).encode() + b"\n")

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, shown: ShownStep) -> "list[ReadableSpan]":
        from rolltape.tracking.genai import rollout_spans, step_span

        rollouts = [rollout_spans(shown, trace, self._resource, self._name) for trace in shown.traces]
        spans = [span for one in rollouts for span in one]
        if shown.summary is not None:
            spans.append(step_span(shown, [one[0] for one in rollouts], self._resource, self._name))
        return spans

    def _key(self) -> tuple[str, str]:
        return self._url, self._name


def _traces_url(url: str) -> str:
    """The URL to post spans to, for a collector's address with or without the path."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SinkError(f"otel: {url!r} is not an address; give one such as http://127.0.0.1:4318")
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))


def _read_sent(path: Path, key: tuple[str, str]) -> set[tuple[str, int]]:
    """The steps that were sent to an address under a name. An incomplete last line is ignored."""
    held = set()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            url, name, split, step = json.loads(line)
        except ValueError:
            continue
        if (url, name) == key:
            held.add((str(split), int(step)))
    return held
