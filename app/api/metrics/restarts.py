"""The metrics of the engine's restarts."""

from __future__ import annotations

from app.api.metrics.kinds import counter, gauge

OF_LOSSES = (
    counter(
        "tokenring_outages_total",
        "outages",
        "Times that the engine was lost: a process `exited`, it `hung`, or it `failed` to start or be read.",
        lambda number: number,
        labels=("cause",),
    ),
)

OF_RESTARTS = (
    counter(
        "tokenring_restarts_total",
        "restarts",
        "Times that the engine was started again and its streams went on.",
        lambda restarts: restarts.num_restarts,
        labels=(),
    ),
    counter(
        "tokenring_outage_seconds_total",
        "seconds",
        "Time from each loss of the engine to the end of its restart, added up.",
        lambda restarts: restarts.away_s,
        labels=(),
    ),
    gauge(
        "tokenring_last_outage_seconds",
        "seconds",
        "The same for the last restart; 0 if there was none.",
        lambda restarts: restarts.last_away_s,
        labels=(),
    ),
    counter(
        "tokenring_choices_resumed_total",
        "choices",
        "Choices that went on after a restart of the engine.",
        lambda restarts: restarts.num_resumed,
        labels=(),
    ),
    counter(
        "tokenring_choices_lost_total",
        "choices",
        "Choices that ended because the engine was lost.",
        lambda restarts: restarts.num_lost,
        labels=(),
    ),
    counter(
        "tokenring_contradictions_total",
        "choices",
        "Outputs of the engine that contradicted themselves, or came after their end; the log names each.",
        lambda restarts: restarts.num_refused,
        labels=(),
    ),
)
