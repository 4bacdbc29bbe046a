"""The pressure on a queue, by which degraded mode steps up and down (app.routing.degraded_mode).

Pressure is 1 where a wait is as long as it may be, or the queue is full. A key's pressure is the expected
wait of its next request, divided by the longest wait that the load shedder allows it. If one of its requests
was refused in the last REFUSED_S seconds, it is at least 1. The median of all keys in use lately counts, so
that one heavy key among others shortens no other key's answers. Keys of the tier batch do not count: their
requests may wait.
"""

from __future__ import annotations

from app.admission.admit import Admission
from app.admission.load_shedder import LoadShedder
from app.admission.queue import Tenant
from app.core import TIERS

RECENT_S = 60.0
REFUSED_S = 2.0
"""Seconds for which a refusal counts as pressure."""
MAX_KEYS = 16
"""The keys that are looked at, at most: each is compared with all that wait."""
_BATCH = TIERS.index("batch")


def pressure_of(admission: Admission, now_s: float) -> float:
    """The pressure on one engine's queue, at a time of the admission's clock."""
    tenants = [
        tenant
        for tenant in admission.queue.tenants
        if tenant.rank < _BATCH and (tenant.active or now_s - tenant.used_at_s < RECENT_S)
    ]
    looked_at = tenants[:: -(-len(tenants) // MAX_KEYS) or 1]
    of_keys = sorted(_of_key(tenant, admission.load_shedder, now_s) for tenant in looked_at)
    median = of_keys[(len(of_keys) - 1) // 2] if of_keys else 0.0
    return max(median, _queued_share(admission))


def _of_key(tenant: Tenant, load_shedder: LoadShedder, now_s: float) -> float:
    pressure = load_shedder.wait_s(tenant, now_s) / load_shedder.max_wait_s(tenant)
    return max(pressure, 1.0) if now_s - tenant.refused_at_s < REFUSED_S else pressure


def _queued_share(admission: Admission) -> float:
    """The share of the queue's bounds that is in use, not by requests of the batch tier."""
    waiting = [queued.tokens for queued in admission.queue if queued.tenant.rank < _BATCH]
    load_shedder = admission.load_shedder
    max_requests = load_shedder.max_queued_requests
    return max(sum(waiting) / load_shedder.max_queued_tokens, len(waiting) / max_requests) if waiting else 0.0
