"""Words as they are indexed: folded alike in texts and in what is searched for, and tagged by owner."""

from __future__ import annotations

import sqlite3
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.store.conversation_list import match_all
from app.store.words import folded, owner_words, tag


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World_2!", ["hello", "world", "2"]),
        ("BRÖWN Straße ﬁn", ["brown", "strasse", "fin"]),
        ("cafe\u0301 café", ["cafe", "cafe"]),
        ("\uff26\uff55\uff4c\uff4c", ["full"]),
        ("한국어", ["한", "국", "어"]),
        ("京都へ、iPhone2台", ["京", "都", "へ", "iphone2", "台"]),
        ("ｶﾞ ㈱", ["ガ", "株"]),
        ("ที่นี่", ["ท", "ี", "่", "น", "ี", "่"]),
        ("किताब, तू", ["किताब", "तू"]),
        ("தமிழ் ދިވެހި བོད་ཡིག", ["தமிழ்", "ދިވެހި", "བོད", "ཡིག"]),
        ("كِتَابٌ مرحـبا", ["كتاب", "مرحبا"]),
        ("עִבְרִית־קלה", ["עברית", "קלה"]),
        ("Привет, ёлка", ["привет", "елка"]),
        ("a\0b", ["a", "b"]),
        ("-- ·", []),
        ("x" * 1000, ["x" * 64]),
    ],
)
def test_words_are_folded(text: str, words: list[str]):
    """Case, accents, vowel points and punctuation do not count; a letter without spaces around is a word."""
    assert folded(text) == words


def test_owners_have_no_word_in_common():
    """Whatever an owner is called, and whatever the text holds: the tag is of fixed length."""
    assert owner_words("ann", "one two") == f"{tag('ann')}one {tag('ann')}two"
    assert tag("ann") != tag("bob")
    assert len(tag("ann")) == len(tag("")) == len(tag("x" * 5000 + "\ud800"))


@pytest.mark.parametrize("separator", [" ", "\n", "\t"])
def test_a_long_text_is_folded_in_pieces_that_part_no_word(separator: str):
    """All of its words, in order."""
    words = [f"word{number}" for number in range(40_000)]
    mark = tag("ann")
    assert owner_words("ann", separator.join(words)) == " ".join(mark + word for word in words)
    assert owner_words("ann", separator.join(words) + "é") == " ".join(
        mark + word for word in [*words[:-1], words[-1] + "e"]
    )


@given(text=st.text(max_size=30), query=st.text(max_size=10))
def test_any_text_is_found_by_its_own_words(text: str, query: str):
    """What is indexed is found by the text itself; no query is a syntax error."""
    c = sqlite3.connect(":memory:")
    c.execute("CREATE VIRTUAL TABLE search USING fts5 (text, tokenize = 'ascii')")
    c.execute("INSERT INTO search VALUES (?)", (owner_words("ann", text),))
    for owner, words, expected in (
        ("ann", text, {1} if folded(text) else {0}),
        ("bob", text, {0}),
        ("ann", query, {0, 1}),
    ):
        match = match_all(words, owner)
        number = (
            c.execute("SELECT count(*) FROM search WHERE search MATCH ?", (match,)).fetchone()[0]
            if match
            else 0
        )
        assert number in expected
    c.close()


def test_a_long_run_of_marks_takes_linear_time() -> None:
    """Normalizing them takes quadratic time: 60,000 took 3 s, of the lock that all threads need."""
    text = "a" + "\u0301\u0323" * 60_000 + " b"
    started_s = time.thread_time()
    assert folded(text) == ["a", "b"]
    assert time.thread_time() - started_s < 1


def test_the_last_word_is_the_beginning_though_it_was_there_before() -> None:
    """The star is behind it, and not behind the word before."""
    assert match_all("test foo test", "ann") == f'"{tag("ann")}foo" "{tag("ann")}test"*'
