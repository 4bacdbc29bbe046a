"""GET /metrics: what the process does, in Prometheus's text format or OpenMetrics.

Everything is read from the runtime at the scrape, as app.api.metrics.tables says; nothing is
counted here, and no registry but our own is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from app.api.metrics.admission import OF_ADMISSION
from app.api.metrics.kinds import Described
from app.api.metrics.models import OF_BACKENDS, OF_DEGRADED, OF_MODE, OF_ROUTES
from app.api.metrics.restarts import OF_LOSSES, OF_RESTARTS
from app.api.metrics.safety import OF_LIFTED, OF_OBSERVED, OF_SCREEN_FAILURES, OF_SCREENS, OF_VERDICTS
from app.api.metrics.tables import (
    OF_ABUSE,
    OF_BALANCE,
    OF_ENGINE,
    OF_LIMITS,
    OF_PREFIXES,
    OF_PROCESS,
    OF_RESPONSES,
    OF_TRAFFIC,
)
from app.errors import EngineNotReady
from app.intake.caller import Caller
from app.metering.traffic import Histogram
from app.routing.backend import Backend
from app.runtime import Runtime

T = TypeVar("T")
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
        engines = _by_model(runtime, lambda backend: backend.engine.load())
        for model in engines:
            # Its counters begin at 0, not with its first request: `rate` must see them rise.
            runtime.traffic.of(model)
            runtime.balance.of(model)
        yield from _families(OF_PROCESS, {"": runtime})
        yield from _families(OF_LOSSES, runtime.restarts.losses)
        yield from _families(OF_RESTARTS, {"": runtime.restarts})
        yield from _families(OF_BACKENDS, _by_model(runtime, lambda backend: backend))
        yield from _families(OF_ROUTES, {} if runtime.router is None else runtime.router.routed)
        mode = runtime.degrade
        yield from _families(OF_MODE, {} if mode is None else {"": mode})
        yield from _families(OF_DEGRADED, {} if mode is None else mode.touched)
        yield from _families(OF_TRAFFIC, runtime.traffic.models)
        yield from _families(OF_ADMISSION, _by_model(runtime, lambda backend: backend.admission))
        yield from _families(OF_ENGINE, engines)
        yield from _families(OF_BALANCE, runtime.balance.models)
        yield from _families(OF_RESPONSES, runtime.responses.by_route())
        yield from _families(OF_LIMITS, runtime.limiter.refused)
        yield from _families(OF_PREFIXES, runtime.prefixes.breaks)
        yield from _families(OF_ABUSE, runtime.abuse.counts)
        screened = runtime.safety_counters
        yield from _families(OF_VERDICTS, screened.verdicts)
        yield from _families(OF_OBSERVED, screened.observed)
        yield from _families(OF_LIFTED, screened.lifted)
        yield from _families(OF_SCREEN_FAILURES, screened.failures)
        yield from _families(OF_SCREENS, {"": screened})


def _by_model(runtime: Runtime, read: Callable[[Backend], T]) -> Mapping[str, T]:
    """Something of each model; nothing before its engine has one, and once it is dead."""
    readings = {}
    for backend in runtime.backends:
        with contextlib.suppress(EngineNotReady):
            readings[backend.id] = read(backend)
    return readings


def _families(table: Sequence[Described], sources: Mapping[str, Any]) -> Iterator[Family]:
    for metric in table:
        family = _KINDS[metric.kind](metric.name, metric.meaning, labels=metric.labels)
        for model, source in sources.items():
            _add(family, [model] if metric.labels else [], metric.read(source))
        yield family


_KINDS: Mapping[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add(family: Family, labels: list[str], value: Any) -> None:
    if isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, _buckets(value), value.sum)
    elif isinstance(value, Mapping):
        for label, number in value.items():
            _add(family, [*labels, label], number)
    else:
        family.add_metric(labels, value)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [
        ("+Inf" if math.isinf(bound) else repr(bound), number) for bound, number in histogram.cumulative()
    ]
