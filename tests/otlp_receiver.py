"""A collector as OpenTelemetry's exporter sees it: it takes OTLP over HTTP, and keeps the spans that it took."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """What was posted. While `refusal` is set, requests are answered with that status and not kept."""

    def __init__(self) -> None:
        self.url = ""
        self.refusal: int | None = None
        self.requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for _, _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.refusal is None:
                request = ExportTraceServiceRequest.FromString(body)
                receiver.requests.append((self.path, dict(self.headers), request))
            self.send_response(receiver.refusal or 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span or an event as plain values."""
    return {one.key: _plain(one.value) for one in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
