"""Who was told to come back when, and how many do."""

from __future__ import annotations

from app.admission.retry_slots import GRACE_S, LEAST_PART, Appointments, Shows


def test_an_appointment_is_kept_once_and_not_early() -> None:
    """At its time or within the grace; a second one with the same body needs one of its own."""
    appointments = Appointments()
    appointments.make(7, 20.0, 100)
    assert not appointments.keep(7, 19.9)
    assert not appointments.keep(8, 20.0)
    assert appointments.keep(7, 21.5)
    assert not appointments.keep(7, 21.5)
    assert (appointments.num, appointments.tokens) == (0, 0)


def test_who_came_is_told_with_who_did_not() -> None:
    """Only when the time of all that were told it is over: one of three came."""
    appointments = Appointments()
    for fingerprint in range(3):
        appointments.make(fingerprint, 20.0, 100)
    assert appointments.keep(1, 20.0)
    assert appointments.close(20.0 + GRACE_S) == (0, 0)
    assert appointments.open
    assert appointments.close(20.1 + GRACE_S) == (1, 2)
    assert not appointments.open


def test_those_expected_are_counted_by_when_they_come() -> None:
    """Late ones, those of this second, and those ahead, as far as is asked."""
    appointments = Appointments()
    for at_s, tokens in ((15.0, 1), (20.5, 10), (21.2, 100), (28.9, 1000), (29.0, 10_000)):
        appointments.make(tokens, at_s, tokens)
    assert appointments.due_within(20.7, (0, 1, 2, 8)) == [11, 111, 111, 1111]
    assert appointments.due_at(29) == 10_000
    assert Appointments().due_within(20.7, (0, 1)) == [0, 0]


def test_how_many_come_is_learned_slowly_and_never_counted_on_too_low() -> None:
    """All are expected at first; of a crowd of whom a fifth comes, half; then four fifths, when they do."""
    shows = Shows()
    assert shows.part == 1.0
    for _ in range(300):
        shows.count(1, 4)
    assert shows.part == LEAST_PART
    for _ in range(300):
        shows.count(4, 1)
    assert 0.75 < shows.part < 0.85
