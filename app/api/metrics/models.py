"""The metrics of two models: which is there, what was chosen, and degraded mode."""

from __future__ import annotations

from app.api.metrics.kinds import counter, gauge

OF_PLACES = (
    gauge(
        "tokenring_model_ready",
        "0 or 1",
        "Whether the model takes requests; the small one may be away while the server is ready.",
        lambda place: place.ready,
    ),
)

OF_ROUTES = (
    counter(
        "tokenring_routed_total",
        "requests",
        "Requests for the model `auto`, by the model that was chosen for them and why; see docs/routing.md.",
        lambda reasons: reasons,
        labels=("model", "reason"),
    ),
)

OF_MODE = (
    gauge(
        "tokenring_degraded_step",
        "0 to 3",
        "Degraded mode: 1 is short answers, 2 the small model too, 3 a full queue; see docs/routing.md.",
        lambda mode: int(mode.step),
        labels=(),
    ),
    gauge(
        "tokenring_degraded_pressure",
        "1",
        "What it goes by: the expected wait over the most that there may be, or how full the queue is.",
        lambda mode: mode.pressure,
        labels=(),
    ),
)

OF_DEGRADED = (
    counter(
        "tokenring_degraded_requests_total",
        "requests",
        "Requests that less was done for: shorter, by the small model, refused by the full queue.",
        lambda number: number,
        labels=("done",),
    ),
)
