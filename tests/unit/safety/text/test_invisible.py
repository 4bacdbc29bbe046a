"""What a reader does not see, by character."""

from __future__ import annotations

import pytest

from app.safety.text.hard_list import HardList
from app.safety.text.invisible import is_invisible, is_unseen
from app.safety.text.normalize import normalize

FILLERS = "\u115f\u1160\u3164\uffa0\U0001d159"
ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u034f\ufe0f\u2065\U000e0001\U000e0041\U000e01f0"
LENGTHENED = "\u0640\u07fa"
MARKS = "\u0301\u0489"


@pytest.mark.parametrize("char", [*FILLERS, *ZERO_WIDTH, *LENGTHENED, "\x00", "\x80", "\ud800"], ids=ascii)
def test_fillers_and_zero_width_characters_show_nothing(char: str):
    """By category or not, assigned or not."""
    assert is_invisible(char)
    assert is_unseen(char)


@pytest.mark.parametrize("char", [*MARKS], ids=ascii)
def test_a_mark_is_seen_but_makes_no_other_letter(char: str):
    """It is left out only where texts are compared."""
    assert not is_invisible(char)
    assert is_unseen(char)


@pytest.mark.parametrize(
    "char", [*"a \n\t\u0085\u2028\u2800", "\u4e00", "\u0628", "\u0e32", "\U0001f600"], ids=ascii
)
def test_letters_spaces_and_pictures_are_seen(char: str):
    """White space of the category of control characters too, and the blank of Braille, which is a space."""
    assert not is_unseen(char)


def test_the_hard_list_and_the_classifiers_leave_out_the_same():
    """What is not seen hides a word from neither."""
    spans = HardList(["canary"])
    for char in filter(is_unseen, map(chr, range(0x110000))):
        assert normalize(f"can{char}ary") == "canary", ascii(char)
        assert spans.found_in(f"can{char}ary"), ascii(char)
