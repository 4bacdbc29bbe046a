"""The pressure on a queue, by which degraded mode steps up and down (app.routing.degraded_mode).

The wait of a key is what its next request would wait, over the most that the door lets it; one that was sent
away in the last seconds is at that. Of all keys that have come lately the one in the middle counts, so that
one heavy key among others shortens nobody's answers. Keys of the tier batch do not count: their requests
are there to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.admission.controller import Admission
from app.admission.fair_queue import Lane
from app.admission.load_shedder import POOLS, Bounds, Door
from app.core import TIERS
from app.routing.degraded_mode import Pressure

LATELY_S = 60.0
REFUSED_S = 2.0
"""Seconds for which a refusal counts as pressure."""
KEYS = 16
"""The keys that are looked at, at most: each is compared with all that wait."""
_BATCH = TIERS.index("batch")


def pressure_of(admission: Admission, bounds: Bounds, now_s: float) -> Pressure:
    """The pressure on one engine's queue, at a time of the admission's clock."""
    share = _share(admission, bounds)
    lanes = [
        lane
        for lane in admission.lanes
        if lane.rank < _BATCH and (lane.active or now_s - lane.used_at_s < LATELY_S)
    ]
    if not lanes:
        return Pressure(0.0, 1.0, share)
    some = lanes[:: -(-len(lanes) // KEYS)]
    waits = sorted(_waits(some, admission.door, now_s), key=lambda wait: wait[0] / wait[1])
    wait_s, most_s = waits[(len(waits) - 1) // 2]
    return Pressure(wait_s, most_s, share)


def _waits(lanes: Sequence[Lane], door: Door, now_s: float) -> Iterator[tuple[float, float]]:
    """For each key, the seconds that its next request would wait, and the seconds that it may."""
    for lane, wait_s in zip(lanes, door.waits_s(lanes, now_s), strict=True):
        most_s = door.most_wait_s(lane)
        refused = now_s - lane.refused_at_s < REFUSED_S
        yield (max(wait_s, most_s) if refused else wait_s), most_s


def _share(admission: Admission, bounds: Bounds) -> float:
    """The queue's fill, not counting requests of the batch tier, which are there to wait."""
    waiting = [queued.tokens for queued in admission.queue if queued.lane.rank < _BATCH]
    most_tokens = bounds.max_queued_tokens or POOLS * admission.pool.capacity_tokens
    if not waiting or not most_tokens:
        return 0.0
    return max(sum(waiting) / most_tokens, len(waiting) / bounds.max_queued_requests)
