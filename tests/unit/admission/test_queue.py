"""The virtual counter of a key that comes back."""

from __future__ import annotations

import pytest

from app.admission.queue import FairQueue, Queued, Tenant
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
    queue.enter(Queued(here, 10, 0.0))
    if credit_tokens:
        back.refuse(0.0, wanted_until_s=1.0)
    comes(queue, "back", 2.0, credit_tokens)
    assert back.served == then


def test_what_a_key_was_served_more_it_keeps() -> None:
    """Coming back makes nothing of it good."""
    queue = FairQueue(TUNING)
    here, back = comes(queue, "here"), comes(queue, "back")
    back.charge(70.0)
    queue.enter(Queued(here, 10, 0.0))
    comes(queue, "back")
    assert back.served == 70.0
