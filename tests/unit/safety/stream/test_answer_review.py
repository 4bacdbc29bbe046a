"""The two ends of an answer that an examination reads."""

from __future__ import annotations

from app.safety.stream.answer_review import Excerpt
from app.safety.thresholds import OPENING_CHARS, REVIEWED_CHARS


def test_a_short_text_is_both_ends():
    """Whatever pieces it comes in."""
    excerpt = Excerpt()
    for piece in ("a ", "", "b ", "c"):
        excerpt.add(piece)
    assert (excerpt.opening, excerpt.ending) == ("a b c", "a b c")


def test_of_a_long_text_the_first_and_the_last_characters_are_kept():
    """To the character, where a piece goes over the edge too."""
    excerpt, text = Excerpt(), "".join(chr(0x4E00 + i) for i in range(3 * REVIEWED_CHARS))
    for at in range(0, len(text), 7):
        excerpt.add(text[at : at + 7])
    assert (excerpt.opening, excerpt.ending) == (text[:OPENING_CHARS], text[-REVIEWED_CHARS:])


def test_reasoning_is_no_opening():
    """A model may doubt and comply; its end is read all the same."""
    excerpt = Excerpt()
    excerpt.switch_channel("reasoning", 0)
    excerpt.add("I cannot ")
    excerpt.switch_channel("text", len("do that\n"))
    excerpt.add("do that\nSure: ")
    excerpt.add("first")
    assert (excerpt.opening, excerpt.ending) == ("Sure: first", "I cannot do that\nSure: first")
