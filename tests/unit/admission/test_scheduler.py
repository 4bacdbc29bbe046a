"""What is in the engine: places, and until requests end as they come."""

from __future__ import annotations

from typing import Any

from app.admission.capacity import DecodeWindow
from app.admission.estimates import LengthEstimate
from app.admission.fair_queue import Tenant
from app.admission.scheduler import YOUNG, InFlight
from app.admission.ticket import Ticket
from app.core import ChatRequest, Prompt
from tests.support.admissions import key_of


def ticket(rid: str, n: int = 1, tokens: int = 100) -> Ticket:
    """One of so many choices and tokens."""
    key = key_of("a")
    request = ChatRequest(rid, "a", "m", {"messages": []}, 0, n=n)

    def unused(*_: Any) -> None: ...

    made = Ticket(
        Tenant(key.id, "standard", 1.0),
        request,
        Prompt([1], 10, None),
        LengthEstimate(10, 0),
        0.0,
        on_progress=unused,
        on_release=unused,
    )
    made.tokens = tokens
    return made


def test_choices_take_places() -> None:
    """Two of two choices each leave none of four, and one that ends leaves two."""
    flight = InFlight()
    flight.most_choices = 4
    first, second = ticket("1", n=2), ticket("2", n=2)
    flight.add(first, 0.0)
    flight.add(second, 0.0)
    assert not flight.has_place(1, 0.0)
    flight.remove(first)
    assert flight.has_place(2, 0.0)
    assert not flight.has_place(2, 0.25)


def test_one_request_always_has_a_place() -> None:
    """Though it has more choices than the engine runs at once."""
    flight = InFlight()
    flight.most_choices = 2
    assert flight.has_place(5, 0.0)


def test_the_decode_window_takes_places_too() -> None:
    """Eight after a start: no ninth, but of a key within its share of them."""
    flight = InFlight(DecodeWindow(0.02))
    for number in range(8):
        assert flight.has_place(1, 0.0)
        flight.add(ticket(str(number)), 0.0)
    assert not flight.has_place(1, 0.0)
    assert flight.has_place(1, 0.0, within=True)
    flight.most_choices = 8
    assert not flight.has_place(1, 0.0, within=True)


def test_after_a_burst_nothing_ends_for_a_while() -> None:
    """1,000 tokens at 100 a second run for ten; a third of that on, some end."""
    flight = InFlight()
    for number in range(10):
        flight.add(ticket(str(number)), 50.0)
    assert flight.ends_after_s(50.0, 100.0) == 10.0
    assert flight.ends_after_s(52.0, 100.0) == 10.0 - YOUNG * 2.0
    assert flight.ends_after_s(60.0, 100.0) == 0.0


def test_what_was_taken_back_counts_until_it_ends() -> None:
    """Once for each request."""
    flight = InFlight()
    one = ticket("1")
    flight.add(one, 0.0)
    flight.reclaim("1")
    flight.reclaim("1")
    flight.reclaim("unknown")
    assert flight.reclaimed_tokens == 100
    flight.remove(one)
    assert flight.reclaimed_tokens == 0
