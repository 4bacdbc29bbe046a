"""Spans that are never released: found in any spelling, in pieces of any size."""

from __future__ import annotations

import random

import pytest

from app.safety.text.hard_list import FOUND, HardList, compiled


def reads(spans: HardList, *pieces: str) -> int:
    """The state after these pieces."""
    state, after_space = 0, False
    for piece in pieces:
        folded = spans.fold(piece, after_space=after_space)
        state = spans.walk(state, folded)
        if state == FOUND:
            return FOUND
        after_space = folded[-1] == " " if folded else after_space
    return state


@pytest.mark.parametrize(
    "said",
    [
        "the Canary-Song is here",
        "CANARY-SONG",
        "canary\u2010song",
        "c\u200ba\u00adn\u0301ary-song",
        "c\u3164a\u115fn\uffa0ary-so\u0640ng",
        "\u0441an\u0430ry-s\u043eng",  # Cyrillic letters among them
        "canary-song",
        "".join(chr(ord(c) + 0x1D4EA - ord("a")) if c != "-" else c for c in "canary-song"),
    ],
)
def test_a_span_is_found_in_any_spelling(said):
    """Case, width, accents, look-alikes and invisible characters make no difference."""
    assert HardList(["canary-song"]).found_in(said)


@pytest.mark.parametrize("said", ["canary song", "canary--song", "canary-son", "anary-song"])
def test_what_is_not_the_span_is_not_found(said):
    """Nothing is guessed."""
    assert not HardList(["canary-song"]).found_in(said)


@pytest.mark.parametrize("said", ["two  words", "two\n\n\twords", "two \u3000 words", "two\u2800\u2800words"])
def test_a_run_of_white_space_is_one_space(said):
    """Wherever it is cut."""
    spans = HardList(["two words"])
    for cut in range(len(said) + 1):
        assert reads(spans, said[:cut], said[cut:]) == FOUND
    assert all(reads(spans, *said[:end]) != FOUND for end in range(len(said)))


def test_any_cut_finds_the_same():
    """A text in random pieces is found to have a span exactly where it has it whole."""
    rng = random.Random(4)
    spans = HardList(["abab", "babc", "c aa", "bb"])
    for _ in range(300):
        text = "".join(rng.choices("abc ", k=30))
        cuts = sorted(rng.choices(range(31), k=6))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 30], strict=True)]
        folded = " ".join(text.split(" "))
        assert (reads(spans, *pieces) == FOUND) == spans.found_in(folded)


def test_the_invisible_does_not_count_for_how_far_a_span_has_begun():
    """So the place up to which a text may be released is in front of the span."""
    spans = HardList(["canary song"])
    assert spans.fold("c\u3164a\u0640n\u2800\u115f", after_space=False) == "can "
    assert spans.depth[reads(spans, "a c\u3164", "\u0640a", "nary\u2800", "\uffa0 s")] == len("canary s")


def test_depth_is_how_much_may_become_a_span():
    """The longest end of the text that a span begins with, after a span that was not to be, too."""
    spans = HardList(["abcabd", "bac"])
    assert spans.depth[reads(spans, "xx", "abc", "ab")] == 5
    assert spans.depth[reads(spans, "abcab", "a")] == 2
    assert spans.depth[reads(spans, "abcx")] == 0


def test_an_empty_list_is_none():
    """There is nothing to look for."""
    assert compiled(()) is None


@pytest.mark.parametrize("span", ["", " ", "\u200b\u200d", "\u3164\u2800"])
def test_a_span_of_nothing_is_refused(span):
    """It would be found everywhere."""
    with pytest.raises(ValueError, match="no visible character"):
        HardList([span])


def test_many_scripts_do_not_fill_the_memory():
    """What is remembered of characters is bounded."""
    spans = HardList(["span"])
    assert not spans.found_in("".join(map(chr, range(0x100, 0xD000))))
    assert len(spans._folding) <= 20_000
