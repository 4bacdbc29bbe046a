"""The metrics of admission; each reads a model's (app.admission.controller)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app.admission.controller import Admission
from app.api.metrics.kinds import counter, gauge
from app.core import TIERS, Tier

BY_TIER = ("model", "tier")


def _by_tier(read: Callable[[Admission, int], float]) -> Callable[[Admission], Mapping[Tier, float]]:
    return lambda admission: {tier: read(admission, rank) for rank, tier in enumerate(TIERS)}


OF_ADMISSION = (
    gauge(
        "tokenring_admission_waiting_requests",
        "requests",
        "Requests that wait for room in the engine.",
        _by_tier(lambda a, rank: a.queue.depth(rank)),
        labels=BY_TIER,
    ),
    gauge(
        "tokenring_admission_waiting_tokens",
        "tokens",
        "KV memory that they are expected to take.",
        _by_tier(lambda a, rank: a.queue.waiting_tokens(rank)),
        labels=BY_TIER,
    ),
    gauge(
        "tokenring_admission_oldest_wait_seconds",
        "seconds",
        "How long the oldest of them has waited; 0 when there is none.",
        _by_tier(lambda a, rank: a.waited_s(rank)),
        labels=BY_TIER,
    ),
    gauge(
        "tokenring_admission_reserved_tokens",
        "tokens",
        "KV memory reserved for requests in the engine: prompts, and what answers are expected to add.",
        lambda a: a.pool.committed_tokens,
    ),
    gauge(
        "tokenring_admission_reservable_tokens",
        "tokens",
        "KV memory that may be reserved: the engine's, less a margin and what is unknown here.",
        lambda a: a.pool.limit_tokens,
    ),
    gauge(
        "tokenring_admission_prefill_tokens",
        "tokens",
        "Uncached prompt tokens that the engine has before it: let in, and without a first token.",
        lambda a: a.gate.waiting_tokens,
    ),
    gauge(
        "tokenring_admission_gate_tokens",
        "tokens",
        "How many of them are let in at once; narrow after a start, and while first tokens are late.",
        lambda a: a.gate.window_tokens,
    ),
    gauge(
        "tokenring_admission_decode_window",
        "choices",
        "How many choices may be answered at once to keep `tpot_target_s`; 0 for any number.",
        lambda a: a.room.in_flight.window.shown,
    ),
    gauge(
        "tokenring_admission_key_window",
        "choices",
        "How many choices may be answered at once before a key that has more than its share waits"
        " (`key_slowdown`); 0 for any number.",
        lambda a: a.room.in_flight.shared_window.shown,
    ),
    counter(
        "tokenring_admission_let_in_total",
        "requests",
        "Requests that were let in, whether they had waited or not.",
        lambda a: a.counts.let_in,
        labels=BY_TIER,
    ),
    counter(
        "tokenring_admission_refused_total",
        "requests",
        "Requests refused for lack of room; `queue_timeout` is after the whole time that they may wait.",
        lambda a: a.counts.refused,
        labels=(*BY_TIER, "code"),
    ),
    counter(
        "tokenring_admission_appointments_total",
        "requests",
        "Refused requests that came back when `Retry-After` had told them (`kept`), or did not (`missed`).",
        lambda a: a.counts.appointments,
        labels=("model", "outcome"),
    ),
    counter(
        "tokenring_admission_unread_aborted_total",
        "streams",
        "Streams that nobody read, stopped because others waited for memory.",
        lambda a: a.counts.unread_aborted,
    ),
)
