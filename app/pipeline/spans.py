"""A request's trace for an OpenTelemetry collector: made of its times when it has ended, sent by a thread.

It has counts, times, the model and the end of the request; no text of a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from urllib.parse import urlsplit

from app.pipeline.trace import Trace
from app.settings import SettingsError

QUEUED_SPANS = 16_384
"""Spans that wait for the collector; beyond it they are dropped."""
EXPORT_TIMEOUT_S = 5
END_S = 3.0
"""Seconds that the stop of the server waits for the collector."""
_MISSING = (
    "otlp_endpoint: needs .venv/bin/python -m pip install opentelemetry-exporter-otlp-proto-http;"
    " or leave the setting empty"
)


class Spans:
    """One trace for each request: a span for the whole, below it a span for each stage."""

    def __init__(self, endpoint: str) -> None:
        """Raises SettingsError where the endpoint is no URL, or the packages are missing."""
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise SettingsError("otlp_endpoint: expected a URL such as http://127.0.0.1:4318")
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as exc:
            raise SettingsError(_MISSING) from exc
        named = {"service.name": "tokenring", "service.version": metadata.version("tokenring")}
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("tokenring")
        self._api, self._extract = trace, TraceContextTextMapPropagator().extract

    def record(self, ended: Trace) -> None:
        """Queue the trace of a request that has ended; it continues the caller's `traceparent`."""
        unix_offset_ns, stages = time.time_ns() - time.monotonic_ns(), ended.stages()

        def unix_ns(at_s: float) -> int:
            return unix_offset_ns + int(at_s * 1e9)

        api, fields = self._api, ended.fields()
        whole = self._tracer.start_span(
            f"chat {fields['model']}",
            self._extract({"traceparent": ended.traceparent}),
            api.SpanKind.SERVER,
            _attributes(fields),
            start_time=unix_ns(stages[0].begins_s),
        )
        inside = api.set_span_in_context(whole)
        for stage in stages:
            span = self._tracer.start_span(stage.name, inside, start_time=unix_ns(stage.begins_s))
            span.end(unix_ns(stage.ends_s))
        if fields["error"]:
            whole.set_status(api.StatusCode.ERROR, str(fields["error"]))
        whole.end(unix_ns(stages[-1].ends_s))

    async def aclose(self) -> None:
        """Send what is queued, as far as the collector takes it in time."""
        ending = threading.Thread(target=self._provider.shutdown, name="otlp-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, END_S)


def _attributes(fields: Mapping[str, object]) -> dict[str, str | int]:
    """OpenTelemetry's names for what the log line of a request has."""
    named = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": fields["model"],
        "gen_ai.response.id": fields["request_id"],
        "gen_ai.response.finish_reasons": fields["finish_reason"],
        "gen_ai.usage.input_tokens": fields["prompt_tokens"],
        "gen_ai.usage.output_tokens": fields["completion_tokens"],
        "tokenring.cached_tokens": fields["cached_tokens"],
        "tokenring.key": fields["key"],
        "error.type": fields["error"],
    }
    return {name: value for name, value in named.items() if isinstance(value, str | int)}
