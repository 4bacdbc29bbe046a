"""A collector of OpenTelemetry: an HTTP server that keeps the spans it is sent."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """Its URL, and the spans so far: by their names."""

    url: str
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def spans(self) -> list[Any]:
        """All spans, in the order in which they came."""
        requests = map(ExportTraceServiceRequest.FromString, self.bodies)
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self) -> dict[str, str]:
        """The attributes of the sender of the first spans."""
        request = ExportTraceServiceRequest.FromString(self.bodies[0])
        return {pair.key: pair.value.string_value for pair in request.resource_spans[0].resource.attributes}


@contextmanager
def collector(status: int = 200) -> Iterator[Collector]:
    """One that answers everything with this status."""
    kept: Collector

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.paths.append(self.path)
            kept.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            del args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        kept = Collector(f"http://127.0.0.1:{served.server_address[1]}")
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield kept
        served.shutdown()
        thread.join()
