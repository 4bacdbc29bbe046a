"""What a text says once its client has undone escapes, wherever a piece ends."""

from __future__ import annotations

import json

import pytest

from app.safety.text.escapes import unescape


@pytest.mark.parametrize(
    "said", ["plain", 'a "quoted" word', "new\nline", "naïve 世界", "a\ttab", "\U0001d41canary"]
)
def test_pieces_say_what_the_whole_does(said):
    """Cut anywhere, escaped in ASCII or not, JSON is read as it was meant; JSON within JSON too."""
    for ascii_only in (True, False):
        once = json.dumps(said, ensure_ascii=ascii_only)[1:-1]
        for raw in (once, json.dumps(once, ensure_ascii=ascii_only)[1:-1]):
            for cut in range(len(raw) + 1):
                first, pending = unescape(raw[:cut])
                rest, left = unescape(pending + raw[cut:])
                assert (first + rest, left) == (said, "")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("\\u0050ay", "Pay"),
        ("\\x50ay", "Pay"),
        ("\\u{50}ay", "Pay"),
        ("\\U00000050ay", "Pay"),
        ("&#80;ay", "Pay"),
        ("&#x50;ay", "Pay"),
        ("&#0000080;ay", "Pay"),
        ("&amp;#80;ay", "Pay"),
        ("\\u0026#80;ay", "Pay"),
        ("\\u005cu0050ay", "Pay"),
        ("R&D, AT&T and a & b", "R&D, AT&T and a & b"),
        ("\\q", "q"),
    ],
)
def test_escapes_of_every_kind_are_undone(raw, said):
    """In whatever pieces they come; what is none stays."""
    for cut in range(len(raw) + 1):
        first, pending = unescape(raw[:cut])
        rest, left = unescape(pending + raw[cut:])
        assert first + rest + left == said


@pytest.mark.parametrize("cut", ["\\", "\\u", "\\u00", "a\\u006", "&", "&#", "&#x5", "&am", "\\ud835\\"])
def test_an_escape_that_goes_on_waits(cut):
    """Until its end has come."""
    assert unescape(cut)[1] == cut.removeprefix("a")


def test_a_run_of_backslashes_is_kept_short():
    """However long it is, what waits is a single character."""
    pending = ""
    for _ in range(1000):
        said, pending = unescape(pending + "\\" * 1000)
        assert (said, len(pending)) == ("", 1)
