"""What a load bench says of what it found."""

from scripts.benchmarks.asking import Attempt
from scripts.benchmarks.findings import judged, markdown, missed, none_of, statuses, unjudged, within
from scripts.benchmarks.stats import Ratio


def test_a_bound_is_met_missed_or_open():
    """Met and missed where the whole interval is on one side, open where it is not, or is nothing."""
    assert judged("x", Ratio(1.0, 0.95, 1.1), "higher", 0.9).verdict == "met"
    assert judged("x", Ratio(1.0, 0.85, 1.1), "higher", 0.9).verdict == "open"
    assert judged("x", Ratio(0.7, 0.65, 0.8), "higher", 0.9).verdict == "missed"
    assert judged("x", Ratio(1.2, 1.1, 1.4), "lower", 1.5).verdict == "met"
    assert judged("x", Ratio(2.0, 1.6, 2.4), "lower", 1.5).verdict == "missed"
    assert judged("x", Ratio(float("nan"), 0, 0), "lower", 1.5).verdict == "open"
    assert within("x", 0.04, 0.05).verdict == "met"
    assert missed([none_of("x", 1)])
    assert not missed([none_of("x", 0), unjudged("y", 3)])


def test_every_answer_that_is_no_answer_counts():
    """A 500, a stream that broke and no answer at all; a refusal without Retry-After."""
    seen = [
        Attempt(0, 0.0, 200),
        Attempt(0, 0.0, 200, "engine_failed"),
        Attempt(0, 0.0, 500, "internal_error"),
        Attempt(0, 0.0, 0, "connection"),
        Attempt(0, 0.0, 429, "key_overloaded", retry_after_s=2),
        Attempt(0, 0.0, 503, "overloaded"),
        Attempt(0, 0.0, 503, "overloaded", retry_after_s=121),
    ]
    found = {one.label: one for one in statuses(seen)}
    assert found["attempts that ended in anything but 200, 429, 503"].value == "3"
    assert found["refusals without Retry-After, or with more than 120 s"].value == "2"
    assert found["answers 503 overloaded"].value == "2"


def test_the_table_is_markdown():
    """One line a finding, below a head and a rule."""
    lines = markdown([unjudged("tokens/s", 12)]).splitlines()
    assert len(lines) == 3
    assert "tokens/s" in lines[2]
