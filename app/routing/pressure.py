"""The pressure on a queue, by which degraded mode steps up and down (app.routing.degraded_mode).

The wait of a key is what its next request would wait, over the most that the load shedder allows it. A key
that was sent away in the last seconds is at that bound. The median of all keys that have come lately counts,
so that one heavy key among others shortens nobody's answers. Keys of the tier batch do not count: their
requests are there to wait.
"""

from __future__ import annotations

from app.admission.admit import Admission
from app.admission.load_shedder import LoadShedder
from app.admission.queue import Tenant
from app.core import TIERS
from app.routing.degraded_mode import Pressure

LATELY_S = 60.0
REFUSED_S = 2.0
"""Seconds for which a refusal counts as pressure."""
KEYS = 16
"""The keys that are looked at, at most: each is compared with all that wait."""
_BATCH = TIERS.index("batch")


def pressure_of(admission: Admission, now_s: float) -> Pressure:
    """The pressure on one engine's queue, at a time of the admission's clock."""
    share = _share(admission)
    tenants = [
        tenant
        for tenant in admission.queue.tenants
        if tenant.rank < _BATCH and (tenant.active or now_s - tenant.used_at_s < LATELY_S)
    ]
    if not tenants:
        return Pressure(0.0, 1.0, share)
    looked_at = tenants[:: -(-len(tenants) // KEYS)]
    waits = sorted(
        (_wait(tenant, admission.load_shedder, now_s) for tenant in looked_at),
        key=lambda wait: wait[0] / wait[1],
    )
    wait_s, max_wait_s = waits[(len(waits) - 1) // 2]
    return Pressure(wait_s, max_wait_s, share)


def _wait(tenant: Tenant, load_shedder: LoadShedder, now_s: float) -> tuple[float, float]:
    """Seconds that a key's next request would wait, and seconds that it may."""
    wait_s, max_wait_s = load_shedder.wait_s(tenant, now_s), load_shedder.max_wait_s(tenant)
    refused = now_s - tenant.refused_at_s < REFUSED_S
    return (max(wait_s, max_wait_s) if refused else wait_s), max_wait_s


def _share(admission: Admission) -> float:
    """The queue's fill, not counting requests of the batch tier, which are there to wait."""
    waiting = [queued.tokens for queued in admission.queue if queued.tenant.rank < _BATCH]
    if not waiting:
        return 0.0
    load_shedder = admission.load_shedder
    return max(
        sum(waiting) / load_shedder.max_queued_tokens, len(waiting) / load_shedder.bounds.max_queued_requests
    )
