"""A series of prompts: its hit rate falls once, and must rise before it can fall again."""

from __future__ import annotations

from app.prefix_report.family import PromptSeries, SeriesKey
from app.prefix_report.line import PromptEdition, Stable


def series() -> PromptSeries:
    """A series of which nothing was seen."""
    return PromptSeries(SeriesKey("ann", None, "llama"), "s1")


def falls(made: PromptSeries, *rates: float) -> list[int]:
    """The requests, from 0, at which the rate is told to have fallen."""
    return [number for number, rate in enumerate(rates) if made.rated(rate)]


def test_rate_that_falls_to_half_of_what_was_usual_is_told_once():
    """However long it stays there."""
    made = series()
    assert falls(made, *[1.0] * 40) == []
    assert len(falls(made, *[0.0] * 12)) == 1
    assert made.fallen


def test_rate_that_has_risen_again_can_fall_again():
    """To three quarters of what is usual."""
    made = series()
    falls(made, *[1.0] * 40, *[0.0] * 12)
    assert falls(made, *[1.0] * 60) == []
    assert not made.fallen
    assert len(falls(made, *[0.0] * 20)) == 1


def test_few_requests_are_not_judged():
    """A series begins with an empty cache."""
    assert falls(series(), *[0.0] * 16) == []


def test_newest_edition_is_the_one_that_was_seen_last():
    """Not the one that was first seen last."""
    made = series()
    for seen_s in (3.0, 5.0, 4.0):
        edition = PromptEdition(Stable("", b""), "", 0, 0.0, 0, 0)
        edition.seen_s = seen_s
        made.lines.append(edition)
    assert made.newest is made.lines[1]
