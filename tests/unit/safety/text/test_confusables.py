"""Look-alikes are folded to what they look like, one letter to one letter, and plain text to itself."""

from __future__ import annotations

import string
import unicodedata

from app.safety.text.confusables import CONFUSABLES, PARENTHESIZED


def test_plain_text_is_left_as_it_is():
    """No ASCII character is in either table."""
    assert string.printable.translate(CONFUSABLES).translate(PARENTHESIZED) == string.printable


def test_words_in_another_alphabet_read_as_they_look():
    """Cyrillic, Greek, stroked, small capital, enclosed and parenthesized letters."""
    assert "\u0440\u0430\u0443\u0440\u0430l".translate(CONFUSABLES) == "paypal"
    assert "\u03bf\u0501\u0501".translate(CONFUSABLES) == "odd"
    assert "\U0001f171\U0001f17e\U0001f17c\U0001f171".translate(CONFUSABLES) == "bomb"
    assert "\u249d\u24aa\u24a8\u249d".translate(PARENTHESIZED) == "bomb"


def test_letters_fold_alike_in_both_cases():
    """A text does not escape by being shouted."""
    for point in CONFUSABLES:
        for other in (chr(point).upper(), chr(point).lower()):
            if len(other) == 1 and not other.isascii():
                assert ord(other) in CONFUSABLES


def test_everything_is_folded_to_ascii():
    """What is left is what the classifiers know."""
    assert all(text.isascii() and text for text in (*CONFUSABLES.values(), *PARENTHESIZED.values()))


def test_letters_that_are_themselves_in_their_language_are_few():
    """Letters of Hebrew, Arabic, Han and kana are none of the table's."""
    scripts = {unicodedata.name(chr(point), "").split(" ")[0] for point in CONFUSABLES}
    assert not scripts & {"HEBREW", "ARABIC", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "DEVANAGARI"}
