"""The pressure on a queue, by which degraded mode steps up and down (app.routing.degraded_mode).

The wait of a key is what its next request would wait, over the most that the load shedder allows it. A key
that was sent away in the last seconds is at that bound. The median of all keys that have come lately counts,
so that one heavy key among others shortens nobody's answers. Keys of the tier batch do not count: their
requests are there to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.admission.controller import Admission
from app.admission.fair_queue import Tenant
from app.admission.load_shedder import POOLS, LoadShedder, QueueBounds
from app.core import TIERS
from app.routing.degraded_mode import Pressure

LATELY_S = 60.0
REFUSED_S = 2.0
"""Seconds for which a refusal counts as pressure."""
KEYS = 16
"""The keys that are looked at, at most: each is compared with all that wait."""
_BATCH = TIERS.index("batch")


def pressure_of(admission: Admission, bounds: QueueBounds, now_s: float) -> Pressure:
    """The pressure on one engine's queue, at a time of the admission's clock."""
    share = _share(admission, bounds)
    tenants = [
        tenant
        for tenant in admission.tenants
        if tenant.rank < _BATCH and (tenant.active or now_s - tenant.used_at_s < LATELY_S)
    ]
    if not tenants:
        return Pressure(0.0, 1.0, share)
    some = tenants[:: -(-len(tenants) // KEYS)]
    waits = sorted(_waits(some, admission.load_shedder, now_s), key=lambda wait: wait[0] / wait[1])
    wait_s, most_s = waits[(len(waits) - 1) // 2]
    return Pressure(wait_s, most_s, share)


def _waits(
    tenants: Sequence[Tenant], load_shedder: LoadShedder, now_s: float
) -> Iterator[tuple[float, float]]:
    """For each key, the seconds that its next request would wait, and the seconds that it may."""
    for tenant, wait_s in zip(tenants, load_shedder.waits_s(tenants, now_s), strict=True):
        most_s = load_shedder.most_wait_s(tenant)
        refused = now_s - tenant.refused_at_s < REFUSED_S
        yield (max(wait_s, most_s) if refused else wait_s), most_s


def _share(admission: Admission, bounds: QueueBounds) -> float:
    """The queue's fill, not counting requests of the batch tier, which are there to wait."""
    waiting = [queued.tokens for queued in admission.queue if queued.tenant.rank < _BATCH]
    most_tokens = bounds.max_queued_tokens or POOLS * admission.kv_budget.capacity_tokens
    if not waiting or not most_tokens:
        return 0.0
    return max(sum(waiting) / most_tokens, len(waiting) / bounds.max_queued_requests)
