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
        "Requests that wait for admission to the engine.",
        _by_tier(lambda a, rank: a.queue.depth(rank)),
        labels=BY_TIER,
    ),
    gauge(
        "tokenring_admission_waiting_tokens",
        "tokens",
        "KV memory that waiting requests are expected to need.",
        _by_tier(lambda a, rank: a.queue.waiting_tokens(rank)),
        labels=BY_TIER,
    ),
    gauge(
        "tokenring_admission_oldest_wait_seconds",
        "seconds",
        "Waiting time of the oldest waiting request; 0 if there is none.",
        _by_tier(lambda a, rank: a.waited_s(rank)),
        labels=BY_TIER,
    ),
    gauge(
        "tokenring_admission_reserved_tokens",
        "tokens",
        "KV memory reserved for admitted requests: their prompts, and the expected length of their answers.",
        lambda a: a.scheduler.kv_budget.committed_tokens,
    ),
    gauge(
        "tokenring_admission_reservable_tokens",
        "tokens",
        "KV memory that may be reserved: the engine's, less a margin and unaccounted use.",
        lambda a: a.scheduler.kv_budget.limit_tokens,
    ),
    gauge(
        "tokenring_admission_prefill_tokens",
        "tokens",
        "Uncached prompt tokens of admitted requests that have no first token yet.",
        lambda a: a.scheduler.prefill_window.waiting_tokens,
    ),
    gauge(
        "tokenring_admission_gate_tokens",
        "tokens",
        "Bound on those tokens; narrow after a start, and while first tokens are late.",
        lambda a: a.scheduler.prefill_window.window_tokens,
    ),
    gauge(
        "tokenring_admission_decode_window",
        "choices",
        "Choices that may run at the same time to keep `tpot_target_s`; 0 is no bound.",
        lambda a: a.scheduler.window.shown,
    ),
    gauge(
        "tokenring_admission_key_window",
        "choices",
        "Choices that may run at the same time before a key with more than its share must wait "
        "(`key_slowdown`); 0 is no bound.",
        lambda a: a.scheduler.key_window.shown,
    ),
    counter(
        "tokenring_admission_let_in_total",
        "requests",
        "Admitted requests, whether they had waited or not.",
        lambda a: a.admitted,
        labels=BY_TIER,
    ),
    counter(
        "tokenring_admission_refused_total",
        "requests",
        "Requests refused for lack of capacity; with `queue_timeout` after their whole waiting time.",
        lambda a: a.load_shedder.refused,
        labels=(*BY_TIER, "code"),
    ),
    counter(
        "tokenring_admission_appointments_total",
        "requests",
        "Refused requests that came back at the time of `Retry-After` (`kept`), or did not (`missed`).",
        lambda a: a.load_shedder.retry_slots,
        labels=("model", "outcome"),
    ),
    counter(
        "tokenring_admission_unread_aborted_total",
        "streams",
        "Streams without a reader that were stopped because other requests waited for KV memory.",
        lambda a: a.num_unread_aborted,
    ),
)
