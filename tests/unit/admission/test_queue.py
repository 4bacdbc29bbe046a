"""The virtual counter of a key that comes back, and the share of a tier that has waited too long."""

from __future__ import annotations

import pytest

from app.admission.queue import AdmissionRequest, FairQueue, Tenant
from app.core import ChatRequest
from tests.support.admissions import TUNING, key_of


def comes(queue: FairQueue, name: str, weight: float = 1.0, pool_tokens: int = 0) -> Tenant:
    """The tenant of a request that comes at the time 0."""
    return queue.touch(
        ChatRequest("r", name, "m", {}, 0), key_of(name, weight=weight), 0.0, pool_tokens=pool_tokens
    )


@pytest.mark.parametrize(
    ("served", "credit_tokens", "then"), [(900.0, 0, 1000.0), (900.0, 500, 900.0), (100.0, 500, 750.0)]
)
def test_a_key_that_was_sent_away_keeps_some_of_what_it_was_served_less(
    served: float, credit_tokens: int, then: float
) -> None:
    """A key that was idle keeps nothing of it; credit is in tokens, counters in tokens over weight."""
    queue = FairQueue(TUNING)
    here, back = comes(queue, "here"), comes(queue, "back", 2.0)
    here.charge(1000.0)
    back.charge(2 * served)
    queue.enter(AdmissionRequest(here, 10, 0.0))
    if credit_tokens:
        back.refuse(0.0, wanted_until_s=1.0)
    comes(queue, "back", 2.0, credit_tokens)
    assert back.served == then


def test_what_a_key_was_served_more_it_keeps() -> None:
    """Coming back makes nothing of it good."""
    queue = FairQueue(TUNING)
    here, back = comes(queue, "here"), comes(queue, "back")
    back.charge(70.0)
    queue.enter(AdmissionRequest(here, 10, 0.0))
    comes(queue, "back")
    assert back.served == 70.0


def test_a_tier_whose_requests_age_singly_has_no_more_than_its_share() -> None:
    """It is served before the tier above it again once that has had four times as many tokens."""
    queue, aged_s = FairQueue(TUNING), TUNING.ageing_s[1]
    above, below = (
        Tenant(name, tier, 1.0, TUNING) for name, tier in (("above", "interactive"), ("below", "standard"))
    )

    def serves() -> AdmissionRequest:
        now_s = 3 * aged_s
        first = next(queue.in_order(now_s))
        queue.remove(first)
        queue.begin(first, 1, now_s)
        return first

    for _ in range(6):
        queue.enter(AdmissionRequest(above, 100, 0.0))
    served = []
    for _ in range(6):
        if not below.waiting:
            queue.enter(AdmissionRequest(below, 100, aged_s))
        served.append(serves().tenant.name)
    assert served == ["below", "above", "above", "above", "above", "below"]


def test_what_passes_a_blocked_request_without_having_aged_costs_its_tier_nothing() -> None:
    """The room was of no use to the tier above: what ages later still goes before it."""
    queue, aged_s = FairQueue(TUNING), TUNING.ageing_s[1]
    above, below = (
        Tenant(name, tier, 1.0, TUNING) for name, tier in (("above", "interactive"), ("below", "standard"))
    )
    passing, waiting = AdmissionRequest(below, 100, 0.0), AdmissionRequest(below, 100, 0.0)
    for queued in (AdmissionRequest(above, 100, 0.0), passing, waiting):
        queue.enter(queued)
    queue.remove(passing)
    queue.begin(passing, 1, 0.0)
    assert next(queue.in_order(aged_s)) is waiting


def test_a_key_that_waits_for_no_room_is_not_wanted_above_others() -> None:
    """It is above its share, and what lower tiers leave free would be no use to it."""
    queue = FairQueue(TUNING)
    above, below = (
        Tenant(name, tier, 1.0, TUNING) for name, tier in (("above", "interactive"), ("below", "batch"))
    )
    queue.enter(AdmissionRequest(above, 10, 0.0))
    assert queue.is_wanted_above(below, 1.0)
    assert not queue.is_wanted_above(below, 1.0, {above})


def test_a_refused_tier_is_wanted_above_the_lower_ones_for_a_while() -> None:
    """It is not its own competitor, and what is long ago does not count."""
    queue = FairQueue(TUNING)
    above, below = (
        Tenant(name, tier, 1.0, TUNING) for name, tier in (("above", "interactive"), ("below", "batch"))
    )
    queue.note_refused(above.rank, 10.0)
    assert [queue.is_wanted_above(tenant, 11.0) for tenant in (above, below)] == [False, True]
    assert not queue.is_wanted_above(below, 10.0 + TUNING.refused_s)
