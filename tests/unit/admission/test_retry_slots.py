"""Who was told to come back when, and how many do."""

from __future__ import annotations

from app.admission.retry_slots import GRACE_S, LEAST_PART, RetrySlots, ReturnRate


def test_an_appointment_is_kept_once_and_not_early() -> None:
    """At its time or within the grace; a second one with the same body needs one of its own."""
    retry_slots = RetrySlots()
    retry_slots.make(7, 20.0, 100)
    assert not retry_slots.keep(7, 19.9)
    assert not retry_slots.keep(8, 20.0)
    assert retry_slots.keep(7, 21.5)
    assert not retry_slots.keep(7, 21.5)
    assert (retry_slots.num, retry_slots.tokens) == (0, 0)


def test_who_came_is_told_with_who_did_not() -> None:
    """Only when the time of all that were told it is over: one of three came."""
    retry_slots = RetrySlots()
    for fingerprint in range(3):
        retry_slots.make(fingerprint, 20.0, 100)
    assert retry_slots.keep(1, 20.0)
    assert retry_slots.close(20.0 + GRACE_S) == (0, 0)
    assert retry_slots.open
    assert retry_slots.close(20.1 + GRACE_S) == (1, 2)
    assert not retry_slots.open


def test_those_expected_are_counted_by_when_they_come() -> None:
    """Late ones, those of this second, and those ahead, as far as is asked."""
    retry_slots = RetrySlots()
    for at_s, tokens in ((15.0, 1), (20.5, 10), (21.2, 100), (28.9, 1000), (29.0, 10_000)):
        retry_slots.make(tokens, at_s, tokens)
    assert retry_slots.due_within(20.7, (0, 1, 2, 8)) == [11, 111, 111, 1111]
    assert retry_slots.due_at(29) == 10_000
    assert RetrySlots().due_within(20.7, (0, 1)) == [0, 0]


def test_how_many_come_is_learned_slowly_and_never_counted_on_too_low() -> None:
    """All are expected at first; of a crowd of whom a fifth comes, half; then four fifths, when they do."""
    return_rate = ReturnRate()
    assert return_rate.part == 1.0
    for _ in range(300):
        return_rate.count(1, 4)
    assert return_rate.part == LEAST_PART
    for _ in range(300):
        return_rate.count(4, 1)
    assert 0.75 < return_rate.part < 0.85
