"""The virtual counter of a key that comes back."""

from __future__ import annotations

import pytest

from app.admission.fair_queue import FairQueue, Queued, Tenant
from tests.support.admissions import TUNING


@pytest.mark.parametrize(
    ("served", "credit_tokens", "then"), [(900.0, 0, 1000.0), (900.0, 500, 900.0), (100.0, 500, 750.0)]
)
def test_a_key_that_was_sent_away_keeps_some_of_what_it_was_served_less(
    served: float, credit_tokens: float, then: float
) -> None:
    """One that was idle keeps nothing of it; credit is in tokens, counters in tokens over weight."""
    queue, here, back = (
        FairQueue(TUNING),
        Tenant("here", "standard", 1, TUNING),
        Tenant("back", "standard", 2, TUNING),
    )
    here.served, back.served = 1000.0, served
    queue.enter(Queued(here, 10, 0.0))
    queue.lift(back, credit_tokens)
    assert back.served == then


def test_what_a_key_was_served_more_it_keeps() -> None:
    """Coming back makes nothing of it good."""
    queue, here, back = (
        FairQueue(TUNING),
        Tenant("here", "standard", 1, TUNING),
        Tenant("back", "standard", 1, TUNING),
    )
    back.served = 70.0
    queue.enter(Queued(here, 10, 0.0))
    queue.lift(back)
    assert back.served == 70.0
