"""GET /metrics: what the process does, in Prometheus's text format or OpenMetrics.

Everything is read from the runtime at the scrape, as app.api.metrics.tables says; nothing is
counted here, and no registry but our own is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from app.api.metrics.tables import (
    TABLES,
    Metric,
    by_model,
)
from app.intake.caller import Caller
from app.metering.traffic import Histogram
from app.runtime import Runtime

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MetricsRoutes:
    """The handler of `/metrics`."""

    def __init__(self, runtime: Runtime) -> None:
        self._abuse = runtime.abuse
        self._registry = CollectorRegistry()
        self._registry.register(RuntimeCollector(runtime))

    async def metrics(self, request: Request, _caller: Caller) -> Response:
        """Every metric, before the engine is ready too; they are of all owners: an admin key sees them."""
        await self._abuse.refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})


class RuntimeCollector(Collector):
    """Reads a runtime at each scrape."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Family]:
        """Every family, those that have no sample yet too."""
        runtime = self._runtime
        for model in by_model(runtime, lambda backend: backend.engine.load()):
            # Its counters begin at 0, not with its first request: `rate` must see them rise.
            runtime.traffic.of(model)
            runtime.balance.of(model)
        for table in TABLES:
            sources = table.sources(runtime)
            for metric in table.metrics:
                yield _family(metric, sources)


def _family(metric: Metric, sources: Mapping[str, Any]) -> Family:
    family = _KINDS[metric.kind](metric.name, metric.meaning, labels=metric.labels)
    for label, source in sources.items():
        _add(family, [label] if label else [], metric.read(source))
    return family


_KINDS: Mapping[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add(family: Family, labels: list[str], value: Any) -> None:
    if isinstance(value, Mapping):
        for label, number in value.items():
            _add(family, [*labels, label], number)
    elif isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, _buckets(value), value.sum)
    else:
        family.add_metric(labels, value)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [
        ("+Inf" if math.isinf(bound) else repr(bound), number) for bound, number in histogram.cumulative()
    ]
