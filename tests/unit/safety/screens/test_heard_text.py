"""The two ends of an answer that an examination reads."""

from __future__ import annotations

from app.safety.screens.heard_text import EXAMINED_CHARS, OPENING_CHARS, HeardText


def test_a_short_text_is_both_ends():
    """Whatever pieces it comes in."""
    heard = HeardText()
    for piece in ("a ", "", "b ", "c"):
        heard.add(piece)
    assert (heard.opening, heard.ending) == ("a b c", "a b c")


def test_of_a_long_text_the_first_and_the_last_characters_are_kept():
    """To the character, where a piece goes over the edge too."""
    heard, text = HeardText(), "".join(chr(0x4E00 + i) for i in range(3 * EXAMINED_CHARS))
    for at in range(0, len(text), 7):
        heard.add(text[at : at + 7])
    assert (heard.opening, heard.ending) == (text[:OPENING_CHARS], text[-EXAMINED_CHARS:])


def test_reasoning_is_no_opening():
    """A model may doubt and comply; its end is read all the same."""
    heard = HeardText()
    heard.turn_to("reasoning", 0)
    heard.add("I cannot ")
    heard.turn_to("text", len("do that\n"))
    heard.add("do that\nSure: ")
    heard.add("first")
    assert (heard.opening, heard.ending) == ("Sure: first", "I cannot do that\nSure: first")
