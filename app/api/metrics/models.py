"""The metrics of two models: which is there, what was chosen, and degraded mode."""

from __future__ import annotations

from app.api.metrics.kinds import counter, gauge

OF_BACKENDS = (
    gauge(
        "tokenring_model_ready",
        "0 or 1",
        "Whether the model takes requests; the small model may be away while the server is ready.",
        lambda backend: backend.ready,
    ),
)

OF_ROUTES = (
    counter(
        "tokenring_routed_total",
        "requests",
        "Requests for the model `auto`, by the chosen model and the reason; see docs/routing.md.",
        lambda reasons: reasons,
        labels=("model", "reason"),
    ),
)

OF_MODE = (
    gauge(
        "tokenring_degraded_step",
        "0 to 3",
        "Step of degraded mode: 1 shortens answers, 2 also uses the small model, 3 refuses requests; see "
        "docs/routing.md.",
        lambda mode: int(mode.step),
        labels=(),
    ),
    gauge(
        "tokenring_degraded_pressure",
        "1",
        "Pressure that decides the step: the expected wait divided by the longest allowed one, or the share"
        " of the queue in use; the larger.",
        lambda mode: mode.pressure,
        labels=(),
    ),
)

OF_DEGRADED = (
    counter(
        "tokenring_degraded_requests_total",
        "requests",
        "Requests affected by degraded mode: shortened, answered by the small model, or refused.",
        lambda number: number,
        labels=("done",),
    ),
)
