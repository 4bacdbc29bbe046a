"""Where two texts part, and what stands there: clocks and ids of many spellings, found whole."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.prefix_report.diff import common_prefix, similar, text_difference, tools_difference

TEXTS = st.text(st.sampled_from("ab0:-T é"), max_size=40)

CLOCKS = (
    ("2026-11-20", "2026-11-21"),
    ("2026-11-20 23:59:59", "2026-11-21 00:00:00"),
    ("2026-11-20T10:00:00.123456+01:00", "2026-11-20T10:00:00.123999+01:00"),
    ("20/11/2026", "21/11/2026"),
    ("20.11.2026, 10:00", "20.11.2026, 10:01"),
    ("10:04 p.m.", "10:05 p.m."),
    ("Monday", "Tuesday"),
    ("Friday 20 November 2026", "Saturday 21 November 2026"),
    ("November 20th, 2026", "November 21st, 2026"),
    ("1790000000", "1790000999"),
    ("1790000000123", "1790000999000"),
)
IDS = (
    ("1b4e28ba-2fa1-11d2-883f-0016d3cca427", "9f4e28ba-2fa1-11d2-883f-0016d3cca427"),
    ("01HQZX3VDW5T7Y2K8M4N6P9R1S", "01HQZX3VDW5T7Y2K8M4N6P9R1T"),
    ("chatcmpl-ab12cd34", "chatcmpl-ab12cd99"),
    ("a3f5c2e8d1b4", "b3f5c2e8d1b4"),
    ("00012345", "00012346"),
)
TEXT = (
    ("Be brief", "Be kind"),
    ("You have 3 tools", "You have 4 tools"),
    ("Use version-two", "Use version-one"),
    ("The year of the dog", "The year of the cat"),
)


@pytest.mark.parametrize(("old", "new"), CLOCKS)
def test_clocks_are_found_whole(old: str, new: str) -> None:
    """From their first character to their last, wherever the difference is in them."""
    found = text_difference(f"Today it is {old}; be nice.", f"Today it is {new}; be nice.")
    assert (found.kind, found.position, found.shown) == ("clock", 12, new)


@pytest.mark.parametrize(("old", "new"), IDS)
def test_ids_are_found_whole(old: str, new: str) -> None:
    """As clocks are."""
    found = text_difference(f"Session id: {old}.", f"Session id: {new}.")
    assert (found.kind, found.position, found.shown) == ("id", 12, new)


@pytest.mark.parametrize(("old", "new"), TEXT)
def test_other_text_is_text(old: str, new: str) -> None:
    """At the first character that is not the same."""
    found = text_difference(old, new)
    assert (found.kind, found.position) == ("text", common_prefix(old, new))


def test_what_was_inserted_or_removed_has_its_length() -> None:
    """Nothing stands where something was removed."""
    assert text_difference("Be kind.", "Be very kind.")[1:3] == (3, 5)
    assert text_difference("Be very kind.", "Be kind.")[1:3] == (3, 0)


@given(TEXTS, TEXTS)
def test_the_position_is_in_the_text_and_not_behind_the_difference(old: str, new: str) -> None:
    """For any two texts: what stands before the position is the same in both."""
    if old == new:
        return
    found = text_difference(old, new)
    assert old[: found.position] == new[: found.position]
    assert 0 <= found.length <= len(new) - found.position
    differs_at = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    if found.kind == "text":
        assert found.position == differs_at
    else:
        assert found.position <= differs_at <= found.position + found.length


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_common_prefix_is_the_common_prefix(a: list[int], b: list[int]) -> None:
    """As counted one by one."""
    expected = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        expected += 1
    assert common_prefix(a, b) == expected


def test_tool_lists_differ_at_a_tool() -> None:
    """Added, removed, in another order, changed; and what is no list is changed as a whole."""
    a, b, c = b'{"n":"a"}', b'{"n":"b"}', b'{"n":"c"}'
    lists = {
        (b"[%b,%b]" % (a, b), b"[%b,%b,%b]" % (a, b, c)): ("added", 2),
        (b"", b"[%b]" % a): ("added", 0),
        (b"[%b,%b]" % (a, b), b"[%b]" % b): ("removed", 0),
        (b"[%b,%b]" % (a, b), b"[%b,%b]" % (b, a)): ("order", 0),
        (b"[%b,%b]" % (a, b), b"[%b,%b]" % (a, c)): ("changed", 1),
        (b"[%b, 1]" % a, b"[%b,1]" % a): ("changed", 2),
        (b'{"x":1}', b'{"x":2}'): ("changed", 0),
    }
    for (old, new), expected in lists.items():
        found = tools_difference(old, new)
        assert (found.kind, found.position) == expected


def test_editions_are_similar_and_strangers_are_not() -> None:
    """By half of the characters in place, or by most of the words."""
    rules = " ".join(f"rule{n}" for n in range(30))
    assert similar(f"It is 10:00. {rules} Session 1234abcd", f"It is 11:30. {rules} Session 99fe11aa")
    assert similar(f"{rules} old end", f"{rules} a new and much longer end")
    assert not similar(rules, " ".join(f"other{n}" for n in range(30)))
    assert not similar("Translate.", "You write code in Rust.")


def test_long_texts_take_linear_time() -> None:
    """A hundred thousand characters that look like clocks and ids all the way."""
    for piece in ("10:00:00 ", "2026-11-20 ", "a1b2-", "Monday, "):
        text = piece * (100_000 // len(piece))
        started_s = time.thread_time()
        text_difference(text + "x", text + "y")
        similar(text + "x", "z" + text)
        assert time.thread_time() - started_s < 0.2
