"""What a tool's arguments say: escapes undone, wherever a piece ends."""

from __future__ import annotations

import json

import pytest

from app.safety.json_text import unescaped


@pytest.mark.parametrize(
    "said", ["plain", 'a "quoted" word', "back\\slash", "new\nline", "naïve 世界", "\\u0041", "\\", "a\tb\\"]
)
def test_pieces_say_what_the_whole_does(said):
    """Cut anywhere, escaped in ASCII or not, JSON is read as it was meant."""
    for ascii_only in (True, False):
        raw = json.dumps(said, ensure_ascii=ascii_only)[1:-1]
        for cut in range(len(raw) + 1):
            first, pending = unescaped(raw[:cut])
            rest, left = unescaped(pending + raw[cut:])
            assert (first + rest, left) == (said, "")


@pytest.mark.parametrize(("raw", "said"), [("\\uZZZZx", "ZZZZx"), ("\\q", "q"), ("\\/", "/")])
def test_what_is_no_escape_is_text(raw, said):
    """Nothing is lost of it, and nothing raised."""
    assert unescaped(raw) == (said, "")


@pytest.mark.parametrize("cut", ["\\", "\\u", "\\u00", "a\\u006"])
def test_an_escape_that_goes_on_waits(cut):
    """Until its end has come."""
    assert unescaped(cut)[1] == cut[cut.index("\\") :]
