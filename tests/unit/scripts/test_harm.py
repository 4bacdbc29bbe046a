"""`bench harm`: which rows it takes, and what it makes of an answer."""

import json

import pytest

from app.safety.evaluation.prompts import Row
from scripts.benchmarks import harm
from scripts.benchmarks.driver import RunFailed
from scripts.benchmarks.harm_ask import BLOCKED, NOTHING, PART, TOO_LONG, WHOLE, Fate, _refused, _told


def rows(**numbers):
    """So many rows of each source."""
    return [Row(f"{source} {i}", True, "S1", source) for source, n in numbers.items() for i in range(n)]


def chunks(*texts, finish="stop", tokens=3, watched=False):
    """The chunks of a streamed answer."""
    said = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    told = {"input": {"results": [{"watched": watched}]}}
    end = {"choices": [{"delta": {}, "finish_reason": finish}]}
    return [
        *said,
        end,
        {"choices": [], "moderation": told},
        {"choices": [], "usage": {"completion_tokens": tokens}},
    ]


def test_every_source_counts_alike_as_long_as_it_has_rows():
    """A small one gives all it has, the others the rest."""
    taken = harm._evenly(rows(a=10, b=2, c=10), 12)
    assert {name: sum(row.source == name for row in taken) for name in "abc"} == {"a": 5, "b": 2, "c": 5}


@pytest.mark.parametrize(
    ("said", "fate"),
    [
        (chunks("a ", "b"), Fate(WHOLE, 3, False, "a b")),
        (chunks("a ", finish="content_filter", watched=True), Fate(PART, 3, True, "a ")),
        (chunks(finish="content_filter", tokens=0), Fate(NOTHING, 0, False, "")),
    ],
)
def test_an_answer_is_whole_or_halted_with_or_without_a_part(said, fate):
    """By its finish reason, and by whether any text came."""
    assert _told(said) == fate


def test_an_answer_that_breaks_off_counts_as_nothing_measured():
    """Neither whole nor halted."""
    with pytest.raises(RunFailed):
        _told(chunks("a")[:1])
    with pytest.raises(RunFailed):
        _told([{"error": {"code": "engine_failed"}}])


@pytest.mark.parametrize(
    ("code", "name"), [("content_filter", BLOCKED), ("context_length_exceeded", TOO_LONG)]
)
def test_a_refusal_is_of_the_screens_or_of_the_length(code, name):
    """Any other would say nothing of harm."""
    assert _refused(400, {"error": {"code": code}}).name == name
    with pytest.raises(RunFailed):
        _refused(503, {"error": {"code": "engine_not_ready"}})


def test_what_came_out_must_be_of_the_reply():
    """Its beginning where it was halted, all of it where it is whole."""
    assert Fate(PART, 1, text="one ").against("one two").name == PART
    for fate in (Fate(WHOLE, 1, text="one "), Fate(PART, 1, text="other")):
        with pytest.raises(RunFailed):
            fate.against("one two")


def test_outcomes_are_counted_by_name_with_an_interval():
    """A row for each name; what was too long for the model is left out."""
    case = harm.Case(harm.BENIGN, *rows(a=1))
    fates = [Fate(WHOLE, 9), Fate(PART, 4), Fate(BLOCKED), Fate(TOO_LONG)]
    table = harm._table([harm.Outcome(case, fate) for fate in fates], lambda each: each.case.arm)
    [_, _, row] = table.splitlines()
    assert row.split(" | ")[1] == "3"
    assert "1: 33.3% [6.2%, 79.2%]" in row
    assert row.endswith("4, 4 |")


def test_no_text_goes_into_the_result():
    """Harmful ones least of all."""
    [prompt, reply] = rows(a=2)
    record = harm.Outcome(harm.Case(harm.AFTER_HARMFUL, prompt, reply), Fate(PART, 4, True, "a 1")).record()
    assert "a 1" not in json.dumps(record)
    assert record == {
        "arm": harm.AFTER_HARMFUL,
        "source": "a",
        "name": PART,
        "tokens": 4,
        "watched": True,
    }
